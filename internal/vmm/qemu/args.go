package qemu

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/forkd/forkd/internal/vmm"
)

// microvm is the machine type with everything switched off that would cost a child time or state. ACPI stays: Debian's kernel
// finds the virtio-mmio devices through it.
const microvm = "microvm,acpi=on,pit=off,pic=off,rtc=off,isa-serial=off,suppress-vmdesc=on,memory-backend=ram"

// consoleRing is the size in bytes of the ring that holds a guest's console inside QEMU, a power of two.
const consoleRing = vmm.ConsoleLimit

// Files of a machine's run directory.
const (
	qmpSocket     = "qmp.sock"
	stateSocket   = "state.sock" // a second control connection; see StageState
	controlSocket = "control.sock"
	dataSocket    = "data.sock"
	consoleFile   = "console.log"
)

// command collects a QEMU command line and the descriptors it refers to.
type command struct {
	args   []string
	files  []*os.File
	uffd   int   // QEMU's number for /dev/userfaultfd; 0: it has none
	layers []int // QEMU's numbers for the layers
}

func (c *command) add(args ...string) { c.args = append(c.args, args...) }

// inherit gives QEMU a descriptor and returns the number it has over there.
func (c *command) inherit(f *os.File) int {
	c.files = append(c.files, f)
	return 2 + len(c.files) // behind stdin, stdout and stderr
}

// sockets are the listening ends a machine inherits.
type sockets struct{ qmp, state, control, data *os.File }

// machineArgs is what a parent and its children have in common: the hardware, down to the order of devices.
func (e *Engine) machineArgs(c *command, info vmm.Info, shape vmm.Shape, memory, rootfs *os.File, nic *vmm.NIC, share string, s sockets) {
	machine := microvm
	if info.Accel == AccelKVM {
		// Without a clock chip the guest asks a port that says "not yet" for a second, 10,000 times. That costs an exit each, and minutes
		// where KVM is nested in an emulation. (Emulation itself keeps the machine of the snapshots that exist.)
		machine = strings.Replace(microvm, "rtc=off", "rtc=on", 1)
	}
	c.add("-M", machine, "-accel", e.accelArg(info.Accel), "-cpu", info.CPU)
	c.add("-smp", strconv.Itoa(shape.VCPUs), "-m", strconv.Itoa(shape.MemMiB)+"M")
	c.add("-nodefaults", "-no-user-config", "-display", "none")
	c.add("-action", "reboot=shutdown,shutdown=pause,panic=pause") // a guest's end is an event; its console can still be read
	c.add("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny")
	c.add("-object", fmt.Sprintf("memory-backend-file,id=ram,size=%dM,mem-path=/proc/self/fd/%d,share=%s", shape.MemMiB, c.inherit(memory), share))
	c.add("-chardev", fmt.Sprintf("socket,id=mon,fd=%d,server=on,wait=off", c.inherit(s.qmp)), "-mon", "chardev=mon,mode=control")
	c.add("-chardev", fmt.Sprintf("socket,id=state,fd=%d,server=on,wait=off", c.inherit(s.state)), "-mon", "chardev=state,mode=control")
	c.add("-chardev", fmt.Sprintf("socket,id=control,fd=%d,server=on,wait=off", c.inherit(s.control)))
	c.add("-chardev", fmt.Sprintf("socket,id=data,fd=%d,server=on,wait=off", c.inherit(s.data)))
	c.add("-chardev", fmt.Sprintf("ringbuf,id=console,size=%d", consoleRing))
	c.add("-device", "virtio-serial-device,max_ports=4,id=ports")
	c.add("-device", "virtconsole,chardev=console")
	c.add("-device", fmt.Sprintf("virtserialport,chardev=control,name=forkd.%d", vmm.PortControl))
	c.add("-device", fmt.Sprintf("virtserialport,chardev=data,name=forkd.%d", vmm.PortData))
	c.add("-blockdev", fmt.Sprintf("driver=file,node-name=root,filename=/proc/self/fd/%d,read-only=on,locking=off,cache.direct=off", c.inherit(rootfs)))
	c.add("-device", "virtio-blk-device,drive=root")
	if shape.Net {
		c.addNIC(nic)
	}
}

// nicOff are the powers that a network device does without. What a guest's driver agreed on is in a snapshot, so children must have exactly the
// same, whatever their tap can do. Without offloads a host's kernel has no segment sizes and checksums of untrusted guests to believe, and
// without announcements a child that was just loaded is not woken to send some.
const nicOff = "csum=off,gso=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off,host_tso4=off,host_tso6=off,host_ecn=off," +
	"host_ufo=off,mrg_rxbuf=off,ctrl_vq=off,ctrl_rx=off,ctrl_vlan=off,ctrl_rx_extra=off,ctrl_mac_addr=off,ctrl_guest_offloads=off,guest_announce=off,mq=off,rss=off"

// addNIC adds a network device, last of all: it is not there in older snapshots. One that is not plugged in is the same to its guest.
func (c *command) addNIC(nic *vmm.NIC) {
	device := "virtio-net-device,mac=" + vmm.GuestMAC + "," + nicOff
	if nic != nil {
		c.add("-netdev", fmt.Sprintf("tap,id=net,fd=%d,vhost=off", c.inherit(nic.Tap)))
		device += ",netdev=net"
	}
	c.add("-device", device)
}

// netNS is the network namespace that a monitor runs in; nil: ours.
func netNS(nic *vmm.NIC) *os.File {
	if nic == nil {
		return nil
	}
	return nic.NetNS
}

func (e *Engine) accelArg(accel string) string {
	if accel == AccelKVM {
		return "kvm"
	}
	return "tcg,thread=multi,tb-size=" + strconv.Itoa(e.opt.TBSizeMiB) // thread=single spins when the guest is stopped
}

// cmdline is the parent's kernel command line.
func cmdline(info vmm.Info, extra []string) string {
	words := []string{"console=hvc0", "quiet", "reboot=t", "panic=-1", "mitigations=off", "psi=0", "nowatchdog", "audit=0", "apparmor=0",
		"init_on_alloc=0", "cgroup_disable=memory"}
	if info.Accel == AccelTCG {
		// Without these a stock kernel hangs while it calibrates the TSC against timers this machine does not have.
		words = append(words, fmt.Sprintf("tsc_early_khz=%d", info.TSCkHz), "tsc=reliable")
	}
	return strings.Join(append(words, extra...), " ")
}

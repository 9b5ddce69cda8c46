package firecracker

import (
	"fmt"
	"time"

	"github.com/forkd/forkd/internal/vmm"
)

// Bodies of requests, as Firecracker's API description has them.
type (
	machineConfig struct {
		VCPUs       int    `json:"vcpu_count"`
		MemMiB      int    `json:"mem_size_mib"`
		SMT         bool   `json:"smt"`
		CPUTemplate string `json:"cpu_template,omitempty"`
		TrackDirty  bool   `json:"track_dirty_pages"`
	}
	bootSource struct {
		Kernel    string `json:"kernel_image_path"`
		Initramfs string `json:"initrd_path,omitempty"`
		Cmdline   string `json:"boot_args"`
	}
	drive struct {
		ID       string `json:"drive_id"`
		Path     string `json:"path_on_host"`
		Root     bool   `json:"is_root_device"`
		ReadOnly bool   `json:"is_read_only"`
	}
	vsockDevice struct {
		CID  uint32 `json:"guest_cid"`
		Path string `json:"uds_path"`
	}
	networkInterface struct {
		ID  string `json:"iface_id"`
		Tap string `json:"host_dev_name"`
		MAC string `json:"guest_mac"`
	}
	entropyDevice struct{}
	action        struct {
		Type string `json:"action_type"`
	}
	vmState struct {
		State string `json:"state"`
	}
	snapshotCreate struct {
		Type   string `json:"snapshot_type"`
		State  string `json:"snapshot_path"`
		Memory string `json:"mem_file_path"`
	}
	snapshotLoad struct {
		State  string        `json:"snapshot_path"`
		Memory memoryBackend `json:"mem_backend"`
		// Two names of one thing: the first up to 1.12, the second from 1.13 on.
		EnableDiff bool `json:"enable_diff_snapshots,omitempty"`
		TrackDirty bool `json:"track_dirty_pages,omitempty"`
		Resume     bool `json:"resume_vm"`
	}
	memoryBackend struct {
		Type string `json:"backend_type"`
		Path string `json:"backend_path"`
	}
	instanceInfo struct {
		State   string `json:"state"`
		Version string `json:"vmm_version"`
	}
)

// States of a machine, as GET / tells them.
const (
	statePaused = "Paused"
	stateNone   = "Not started"
)

// The numbers under which each Firecracker holds its files. They are in the device state, so a child must hold its root file system
// under the number under which the parent held it.
const (
	fdRootfs = 3 + iota
	fdState  // a memfd that device states go through: nothing of them touches a disk
	fdMemory // a child's image; what a parent's memory is written to when it is frozen
	fdFree   // the first of those that only some have
)

// fdPath is a file that Firecracker holds, as it opens it.
func fdPath(n int) string { return fmt.Sprintf("/proc/self/fd/%d", n) }

// guestCID is every guest's address; the host finds a guest by its socket.
const guestCID = 3

func putMachine(s vmm.Shape, template string, track bool) call {
	return call{step: "set the machine's shape", method: "PUT", path: "/machine-config",
		body: machineConfig{VCPUs: s.VCPUs, MemMiB: s.MemMiB, CPUTemplate: template, TrackDirty: track}}
}

func putBoot(b bootSource) call {
	return call{step: "set the kernel", method: "PUT", path: "/boot-source", body: b}
}

func putRootfs() call {
	return call{step: "attach the root file system", method: "PUT", path: "/drives/root", body: drive{ID: "root", Path: fdPath(fdRootfs), ReadOnly: true}}
}

func putVsock() call {
	return call{step: "attach the vsock device", method: "PUT", path: "/vsock", body: vsockDevice{CID: guestCID, Path: vsockSocket}}
}

func putNetwork() call {
	return call{step: "attach the network device", method: "PUT", path: "/network-interfaces/net", body: networkInterface{ID: "net", Tap: vmm.TapName, MAC: vmm.GuestMAC}}
}

func putEntropy() call {
	return call{step: "attach the entropy device", method: "PUT", path: "/entropy", body: entropyDevice{}}
}

func startInstance() call {
	return call{step: "start the guest", method: "PUT", path: "/actions", body: action{Type: "InstanceStart"}, limit: time.Minute}
}

func pauseVM() call {
	return call{step: "pause", method: "PATCH", path: "/vm", body: vmState{State: "Paused"}}
}

func resumeVM() call {
	return call{step: "resume", method: "PATCH", path: "/vm", body: vmState{State: "Resumed"}}
}

func createSnapshot(kind, memory string, limit time.Duration) call {
	return call{step: "save the device state", method: "PUT", path: "/snapshot/create", limit: limit,
		body: snapshotCreate{Type: kind, State: fdPath(fdState), Memory: memory}}
}

func loadSnapshot(l snapshotLoad) call {
	l.State, l.Memory = fdPath(fdState), memoryBackend{Type: "File", Path: fdPath(fdMemory)}
	return call{step: "load the device state", method: "PUT", path: "/snapshot/load", body: l}
}

func getInstance(into *instanceInfo) call {
	return call{step: "ask for the machine's state", method: "GET", path: "/", result: into}
}

#!/bin/sh
# Makes a fresh Debian root the lab's: run in it once, when it is built. Writes the initramfs to /boot/initrd-lab.
set -eu
mkdir -p /work /etc/systemd/system/multi-user.target.wants /etc/modules-load.d
echo lab >/etc/hostname
printf '127.0.0.1 localhost lab\n' >/etc/hosts
: >/etc/fstab
: >/etc/machine-id
printf 'kvm-amd\nvhost-vsock\ntun\next4\n' >/etc/modules-load.d/lab.conf
printf 'options kvm-amd nested=0\n' >/etc/modprobe.d/lab.conf

cat >/etc/systemd/system/lab.service <<'UNIT'
[Unit]
Description=Runs what the lab is told
After=systemd-modules-load.service local-fs.target sysinit.target
Wants=systemd-modules-load.service

[Service]
ExecStart=/usr/local/sbin/lab guest
Delegate=yes
OOMPolicy=continue
LimitNOFILE=65536
TasksMax=infinity

[Install]
WantedBy=multi-user.target
UNIT
ln -sf ../lab.service /etc/systemd/system/multi-user.target.wants/lab.service
cp /usr/share/systemd/tmp.mount /etc/systemd/system/tmp.mount
mkdir -p /etc/systemd/system/local-fs.target.wants
ln -sf ../tmp.mount /etc/systemd/system/local-fs.target.wants/tmp.mount
for unit in serial-getty@.service getty@.service getty.target apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
  e2scrub_reap.service systemd-timesyncd.service fstrim.timer nftables.service systemd-firstboot.service systemd-hwdb-update.service \
  modprobe@.service systemd-logind.service systemd-binfmt.service systemd-sysusers.service systemd-random-seed.service systemd-update-utmp.service \
  dev-hugepages.mount dev-mqueue.mount sys-kernel-debug.mount sys-kernel-tracing.mount systemd-user-sessions.service systemd-pcrphase.service \
  systemd-journal-flush.service systemd-journal-catalog-update.service systemd-boot-update.service proc-sys-fs-binfmt_misc.automount \
  systemd-udevd.service systemd-udev-trigger.service systemd-udevd-kernel.socket systemd-udevd-control.socket ldconfig.service; do
  ln -sf /dev/null "/etc/systemd/system/$unit"
done
ln -sf multi-user.target /etc/systemd/system/default.target
mkdir -p /etc/systemd/journald.conf.d
printf '[Journal]\nStorage=volatile\nRuntimeMaxUse=32M\n' >/etc/systemd/journald.conf.d/lab.conf

set -- /lib/modules/*
kernel=${1##*/}
depmod "$kernel"
dir=/tmp/initrd
mkdir -p $dir/bin $dir/modules $dir/dev
cp /bin/busybox $dir/bin/
cp /setup/init $dir/init
chmod 755 $dir/init
for module in virtio_mmio virtio_blk virtio_console erofs overlay; do
  modprobe --set-version "$kernel" --show-depends "$module"
done | while read -r word path rest; do
  [ "$word" = insmod ] || continue
  grep -qx "${path##*/}" $dir/modules/order 2>/dev/null && continue
  cp "$path" $dir/modules/
  echo "${path##*/}" >>$dir/modules/order
done
(cd $dir && find . | sort | cpio --quiet -o -H newc) >/boot/initrd-lab
mv "/boot/vmlinuz-$kernel" /boot/vmlinuz-lab
rm -rf $dir /boot/initrd.img* /boot/System.map* /var/cache/apt/* /var/lib/apt/lists/* /usr/share/doc/* /usr/share/man/* /usr/share/locale/*

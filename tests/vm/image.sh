#!/bin/sh
# image.sh [-k SERIES]: a host with systemd for suites on the machine `systemd`: Debian 12 with systemd as PID 1, booted
# once on the kernel of the series and saved in the moment in which it waits for orders; systemd.sh goes on from there,
# in 2 s and not in the time of a boot. Does nothing when all is there. As root, for the root file system.
#
# 1. `systemd.img`: Debian's packages alone, without udev: nothing here needs it.
# 2. `systemd-SERIES.initramfs`: the one driver of a disk in Debian's cloud kernels is that for NVMe, and QEMU cannot
#    save a machine with NVMe. So virtio_blk, from the kernel's own package.
# 3. `systemd-SERIES.disk`, what a boot made of the image, and `systemd-SERIES.state`, the machine.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=systemd-lib.sh
. "$vm/systemd-lib.sh"

# Files of a root file system belong to many users.
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "as root, please: a root file system is made"
    exec sudo env TRUEPIN_CACHE="${cache%/vm}" "$0" "$@"
fi
kernel=$test_series
while getopts k: option; do
    case $option in
        k) kernel=$OPTARG ;;
        *) die "usage: image.sh [-k SERIES]" ;;
    esac
done
[ -s "$cache/kernel-$kernel.info" ] || die "no kernel $kernel (make setup)"
suite=bookworm
# Beside the essential packages: `make install` is run in there.
packages=systemd,systemd-sysv,dbus,make
PATH=$PATH:/usr/sbin:/sbin
exec 9>"$cache/systemd.lock"
flock 9
work=
pid=
trap '[ -z "$pid" ] || kill "$pid" 2>/dev/null || true; [ -z "$work" ] || rm -rf "$work"' EXIT

# Whether NAME was made from what is said on standard input; what it was made from is remembered by made.
up_to_date() { cat >"$cache/$1.from.new" && [ -s "$cache/$1" ] && cmp -s "$cache/$1.from" "$cache/$1.from.new"; }
made() { mv "$cache/$1.new" "$cache/$1" && mv "$cache/$1.from.new" "$cache/$1.from"; }

# --- 1. the root file system -----------------------------------------------------------------------------------------
if ! { echo "$suite $packages" && cat "$vm/image.sh"; } | up_to_date systemd.img; then
    command -v mmdebstrap >/dev/null || install_packages mmdebstrap
    say "a root file system of $suite with $packages"
    work=$cache/systemd.work
    rm -rf "$work"
    mkdir -p "$work"
    # A mirror of our own choosing may serve Release files that have run out; signatures are still checked.
    mmdebstrap --variant=essential --include="$packages" --aptopt='Acquire::Check-Valid-Until "false"' \
        --aptopt='Acquire::Languages "none"' --aptopt='APT::Install-Recommends "false"' \
        --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" "$work/root.tar" "deb $(mirror) $suite main" >"$cache/mmdebstrap.log" 2>&1 ||
        { tail -20 "$cache/mmdebstrap.log" >&2; die "mmdebstrap failed; all of it: $cache/mmdebstrap.log"; }
    root=$work/root
    mkdir "$root"
    tar -x -f "$work/root.tar" -C "$root"
    echo truepin >"$root/etc/hostname"
    : >"$root/etc/fstab"
    mkdir -p "$root/rig"
    cat >"$root/rig/orders" <<'END'
#!/bin/sh
# Waits for orders: a disk that begins with the word, and has an archive at 1 MiB. Read past the cache, which may hold
# what was there when the machine was saved.
echo "# waiting for orders" >/dev/ttyS1
until [ "$(dd if=/dev/vdb bs=4096 count=1 iflag=direct 2>/dev/null | head -c 7)" = truepin ]; do sleep 0.2; done
dd if=/dev/vdb bs=1M skip=1 iflag=direct 2>/dev/null | tar -x -C /rig
exec /rig/start
END
    chmod 755 "$root/rig/orders"
    cat >"$root/etc/systemd/system/rig.service" <<'END'
[Unit]
Description=The driver of the scenarios
[Service]
Type=exec
ExecStart=/rig/orders
StandardOutput=file:/dev/ttyS0
StandardError=inherit
[Install]
WantedBy=multi-user.target
END
    wanted=$root/etc/systemd/system/multi-user.target.wants
    mkdir -p "$wanted"
    ln -s ../rig.service "$wanted/rig.service"
    # Nobody logs in, there is no network, and what happens by the clock would disturb.
    for unit in getty.target systemd-timesyncd.service systemd-networkd.service systemd-random-seed.service \
        apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer \
        systemd-tmpfiles-clean.timer systemd-pstore.service; do
        ln -sf /dev/null "$root/etc/systemd/system/$unit"
    done
    mke2fs -q -t ext4 -d "$root" "$cache/systemd.img.new" 600M || die "mke2fs failed (Debian: e2fsprogs)"
    rm -rf "$work"
    work=
    made systemd.img
fi

# --- 2. the initramfs ------------------------------------------------------------------------------------------------
if ! { cat "$cache/kernel-$kernel.info" "$vm/image.sh"; } | up_to_date "systemd-$kernel.initramfs"; then
    release=$(sed -n 's/^release //p' "$cache/kernel-$kernel.info")
    version=$(sed -n 's/^version //p' "$cache/kernel-$kernel.info")
    private_apt kernels "$(mirror) $kernel_suites"
    work=$cache/systemd.work
    rm -rf "$work"
    mkdir -p "$work/root/bin" "$work/root/proc" "$work/root/dev" "$work/root/new"
    # From 7.2 on the modules have a package of their own.
    package=linux-image-$release
    if apt-cache show "linux-modules-$release" >/dev/null 2>&1; then package=linux-modules-$release; fi
    (cd "$work" && apt-get download -qq "$package=$version") ||
        die "$package=$version is not offered any more (REFRESH=1 make setup)"
    dpkg-deb --fsys-tarfile "$work"/*.deb | tar -x -C "$work" --wildcards --strip-components 7 '*/virtio_blk.ko*'
    [ ! -e "$work/block/virtio_blk.ko.xz" ] || xz -d "$work/block/virtio_blk.ko.xz"
    cp "$work/block/virtio_blk.ko" "$work/root/" || die "no virtio_blk in $package"
    cp /usr/bin/busybox "$work/root/bin/"
    cat >"$work/root/init" <<'END'
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs none /dev
/bin/busybox insmod /virtio_blk.ko
/bin/busybox mount -t ext4 /dev/vda /new || exec /bin/busybox poweroff -f
/bin/busybox mount --move /dev /new/dev
exec /bin/busybox switch_root /new /sbin/init
END
    chmod 755 "$work/root/init"
    (cd "$work/root" && find . -print0 | LC_ALL=C sort -z | cpio --null -o -H newc --quiet --owner=0:0) \
        >"$cache/systemd-$kernel.initramfs.new"
    rm -rf "$work"
    work=
    made "systemd-$kernel.initramfs"
fi

# --- 3. the saved machine --------------------------------------------------------------------------------------------
if ! { cat "$cache/systemd.img.from" "$cache/systemd-$kernel.initramfs.from" "$vm/systemd-lib.sh" \
    "$vm/machines/systemd" && qemu-system-x86_64 --version; } | up_to_date "systemd-$kernel.state"; then
    say "booting it on $kernel"
    start=$(date +%s)
    name=$cache/systemd-$kernel
    cp --sparse=always "$cache/systemd.img" "$name.disk"
    rm -f "$name.orders" "$name.boot" "$name.state.new" "$name.monitor.in" "$name.monitor.out"
    truncate -s "$orders_size" "$name.orders"
    mkfifo "$name.monitor.in" "$name.monitor.out"
    # Held open here, so that neither side waits for the other.
    exec 3<>"$name.monitor.in" 4<>"$name.monitor.out"
    # shellcheck disable=SC2046
    timeout 400 qemu-system-x86_64 $(machine_words "$kernel" "$name.disk" "$name.orders") \
        -append "$machine_command_line" -serial "file:$name.console" -serial "file:$name.boot" \
        -chardev "pipe,id=monitor,path=$name.monitor" -mon chardev=monitor,mode=readline \
        </dev/null >"$name.qemu" 2>&1 3>&- 4>&- 9>&- &
    pid=$!
    until grep -q 'waiting for orders' "$name.boot" 2>/dev/null; do
        kill -0 "$pid" 2>/dev/null || { tail -20 "$name.console" >&2; die "the machine ended (or took 400 s)"; }
        sleep 0.2
    done
    say "up after $(($(date +%s) - start)) s"
    # Until what starts at boot has settled; the idle machine's memory is then copied while it runs, which leaves it
    # running when it is taken up again.
    sleep 10
    printf 'migrate_set_parameter max-bandwidth 4G\nmigrate "exec:cat >%s.state.new"\nquit\n' "$name" >&3
    wait "$pid" || { tail -5 "$name.qemu" >&2; die "QEMU failed while the machine was saved"; }
    pid=
    [ -s "$name.state.new" ] || { tail -5 "$name.qemu" >&2; die "the machine was not saved"; }
    rm -f "$name.monitor.in" "$name.monitor.out" "$name.orders"
    made "systemd-$kernel.state"
    say "saved after $(($(date +%s) - start)) s: $(du -m "$name.state" | cut -f1) MiB"
fi

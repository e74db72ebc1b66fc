#!/bin/sh
# setup.sh [KERNEL_SERIES...]: what the virtual machines need, with the kernel of `make test` or those named; `all`: those
# of the matrix. A series is the beginning of a version: `7` is the newest 7.x that is offered.
#
# 1. Host tools (QEMU and a few small ones) from the machine's own Debian suite; on Debian 12 QEMU from its backports,
#    because 7.2 lacks the CPU model used here. A QEMU that is there already is taken as it is.
# 2. Kernels: Debian's cloud kernels, of whatever suite offers the series; downloaded and unpacked, never installed.
# 3. With `SYSTEMD=1` the saved host with systemd (image.sh), which its suites make themselves when it is not there.
# Does nothing, and asks no mirror, when all is there. `REFRESH=1` looks for newer kernels.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

kernels=$(series "$@")

[ "$(uname -m)" = x86_64 ] || die "the virtual machines are x86_64; this machine is $(uname -m)"

# --- 1. host tools ---------------------------------------------------------------------------------------------------
missing=
want() { command -v "$1" >/dev/null || missing="$missing $2"; }
want qemu-system-x86_64 qemu-system-x86
want cpio cpio
want xz xz-utils
want zstd zstd
want cc gcc
[ -e /usr/sbin/mkfs.ext4 ] || missing="$missing e2fsprogs"
[ -e /usr/bin/busybox ] && ! ldd /usr/bin/busybox >/dev/null 2>&1 || missing="$missing busybox-static"
[ -e /usr/lib/x86_64-linux-gnu/libc.a ] || missing="$missing libc6-dev"
# shellcheck disable=SC2086
[ -z "$missing" ] || install_packages $missing

# --- 2. kernels ------------------------------------------------------------------------------------------------------
# Suites that are looked at for a kernel, oldest first. Names of releases, since "stable" means another one each time.
suites="bookworm bookworm-backports trixie trixie-backports forky"

ready() { [ -s "$cache/vmlinux-$1" ] && [ -s "$cache/kernel-$1.info" ] && [ -z "${REFRESH:-}" ]; }

# The newest version of the meta package in this series: "VERSION", or nothing.
newest() {
    apt-cache madison linux-image-cloud-amd64 | awk '{ print $3 }' | grep "^$(printf %s "$1" | sed 's/\./\\./g')\." |
        sort -Vr | head -1
}

fetch_kernel() {
    series=$1
    version=$(newest "$series")
    [ -n "$version" ] || die "no kernel $series.* for the cloud in $suites; there are: $(
        apt-cache madison linux-image-cloud-amd64 | awk '{ print $3 }' | sort -Vu | tr '\n' ' ')"
    image=$(apt-cache depends "linux-image-cloud-amd64=$version" | awk '/Depends: linux-image-/ { print $2; exit }')
    [ -n "$image" ] || die "linux-image-cloud-amd64=$version names no kernel image"
    release=${image#linux-image-}
    if [ "$(sed -n 's/^version //p' "$cache/kernel-$series.info" 2>/dev/null)" = "$version" ]; then
        return 0
    fi
    say "kernel $series: downloading $release ($version)"
    work=$cache/kernel-$series.new
    rm -rf "$work"
    mkdir -p "$work/deb" "$work/root"
    # From 7.2 on the image package is empty and depends on one with the kernel in it.
    packages=$image
    if apt-cache show "linux-binary-$release" >/dev/null 2>&1; then packages="$packages linux-binary-$release"; fi
    # shellcheck disable=SC2086
    (cd "$work/deb" && apt-get download -qq $packages) || die "downloading $packages failed"
    for deb in "$work"/deb/*.deb; do dpkg-deb -x "$deb" "$work/root"; done
    image_file=$(find "$work/root" -name 'vmlinuz*' -type f | head -1)
    [ -n "$image_file" ] || die "no vmlinuz in $packages"
    deb=$(find "$work/deb" -name 'linux-binary-*.deb' | head -1)
    [ -n "$deb" ] || deb=$(find "$work/deb" -name '*.deb' | head -1)
    say "kernel $series: unpacking"
    "$vm/extract-vmlinux.sh" "$image_file" "$work/vmlinux"
    mv "$work/vmlinux" "$cache/vmlinux-$series"
    # Written last: without it the kernel does not count as there.
    {
        echo "release $release"
        echo "version $version"
        echo "sha256 $(sha256sum "$deb" | cut -d' ' -f1)"
        echo "package $(basename "$deb")"
    } >"$cache/kernel-$series.info.new"
    mv "$cache/kernel-$series.info.new" "$cache/kernel-$series.info"
    rm -rf "$work"
}

# Says, loudly, when a kernel is not the one that was last tested.
compare() {
    have="$1 $(sed -n 's/^version //p' "$cache/kernel-$1.info") $(sed -n 's/^sha256 //p' "$cache/kernel-$1.info")"
    tested=$(awk -v s="$1" '$1 == s { print $1, $2, $3 }' "$vm/kernels.tested")
    [ "$have" = "$tested" ] && return 0
    warn "*********************************************************************************************"
    warn "* kernel $1 is not the one last tested (tests/vm/kernels.tested)."
    warn "*   here:        ${have#* }"
    warn "*   last tested: $([ -n "$tested" ] && echo "${tested#* }" || echo none of this series)"
    warn "* A failure may be the kernel's. When all passes, put this line into that file:"
    warn "$have"
    warn "*********************************************************************************************"
}

for series in $kernels; do
    if ! ready "$series"; then
        # shellcheck disable=SC2046
        private_apt kernels "$(mirror) $suites"
        fetch_kernel "$series"
    fi
    compare "$series"
done

# --- 3. the host with systemd ----------------------------------------------------------------------------------------
if [ -n "${SYSTEMD:-}" ]; then
    for series in $kernels; do "$vm/image.sh" -k "$series"; done
fi

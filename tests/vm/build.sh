#!/bin/sh
# build.sh: the static binaries, and the initramfs that holds them, into $TRUEPIN_CACHE/vm/initramfs.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

binaries=$("$repo/tests/build")
root=$cache/initramfs.new
rm -rf "$root"
mkdir -p "$root/bin"
cp /usr/bin/busybox "$binaries/truepin" "$binaries/truepin-guest" "$root/bin/"
ln -s bin/truepin-guest "$root/init"
# Not compressed: unpacking would cost emulated CPU time, and the host's page cache makes reading it free.
(cd "$root" && find . -print0 | LC_ALL=C sort -z | cpio --null -o -H newc --quiet --owner=0:0) >"$cache/initramfs.part"
mv "$cache/initramfs.part" "$cache/initramfs"
rm -rf "$root"

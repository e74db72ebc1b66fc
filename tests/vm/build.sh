#!/bin/sh
# build.sh: the two static binaries and the initramfs that holds them, into $TRUEPIN_CACHE/vm/initramfs.
#
# Static, so that the initramfs needs no libraries. The target is named though it is the host's: only then do the
# flags not reach procedural macros, which cannot be static. `make test` builds its tests with the same flags and
# target, so nothing is compiled twice.
. "$(dirname "$0")/lib.sh"

target=x86_64-unknown-linux-gnu
cd "$repo"
say "building the static binaries"
RUSTFLAGS='-C target-feature=+crt-static' cargo build --release --target "$target" -p truepin-agent -p truepin-tests --bins
binaries=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')/$target/release

root=$cache/initramfs.new
rm -rf "$root"
mkdir -p "$root/bin"
cp /usr/bin/busybox "$binaries/truepin" "$binaries/truepin-guest" "$root/bin/"
ln -s bin/truepin-guest "$root/init"
# Not compressed: unpacking would cost emulated CPU time, and the host's page cache makes reading it free.
(cd "$root" && find . -print0 | LC_ALL=C sort -z | cpio --null -o -H newc --quiet --owner=0:0) >"$cache/initramfs.part"
mv "$cache/initramfs.part" "$cache/initramfs"
rm -rf "$root"

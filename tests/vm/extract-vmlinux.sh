#!/bin/sh
# extract-vmlinux.sh BZIMAGE OUT: the uncompressed ELF kernel out of a bzImage.
#
# QEMU starts it by its PVH note, without the decompressor, which would cost seconds of emulated CPU time.
# Layout: Documentation/arch/x86/boot.rst: 0x1f1 setup_sects, 0x202 "HdrS", 0x248 payload_offset, 0x24c payload_length;
# the payload's last four bytes are the unpacked size (scripts/Makefile.lib, size_append).
set -eu
image=$1
out=$2
die() {
    echo "error: $image: $*" >&2
    exit 1
}
number() { od -An -v -t "u$2" -j "$1" -N "$2" "$image" | tr -d ' '; }

[ "$(dd if="$image" bs=1 skip=$((0x202)) count=4 2>/dev/null)" = HdrS ] || die "no bzImage"
sectors=$(number $((0x1f1)) 1)
[ "$sectors" -gt 0 ] || sectors=4
start=$(((sectors + 1) * 512 + $(number $((0x248)) 4)))
length=$(number $((0x24c)) 4)
size=$(number $((start + length - 4)) 4)
magic=$(od -An -v -t x1 -j "$start" -N 4 "$image" | tr -d ' ')
case $magic in
    28b52ffd) unpack='zstd -dcq' ;;
    fd377a58) unpack='xz -dcq' ;;
    1f8b*) unpack='gzip -dcq' ;;
    02214c18) unpack='lz4 -dcq' ;;
    *) die "unknown compression, magic $magic" ;;
esac
command -v "${unpack%% *}" >/dev/null || die "${unpack%% *} is needed to unpack it"
tail -c +$((start + 1)) "$image" | head -c $((length - 4)) | $unpack >"$out" || die "$unpack failed"
[ "$(stat -c %s "$out")" = "$size" ] || die "$(stat -c %s "$out") bytes unpacked, expected $size"
[ "$(head -c 4 "$out" | od -An -v -t x1 | tr -d ' ')" = 7f454c46 ] || die "the payload is no ELF file"

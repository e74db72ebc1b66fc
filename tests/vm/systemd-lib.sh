# shellcheck shell=sh
# The machine with systemd, as image.sh saves it and systemd.sh takes it up: both must give QEMU the same. Sourced.

# Room for the binaries; the size of a disk is part of the saved machine.
orders_size=64M
# Suites that are looked at for the kernel's package.
kernel_suites="bookworm bookworm-backports trixie trixie-backports forky"

# machine_words KERNEL DISK ORDERS [OPTION]: QEMU's arguments, words without spaces. OPTION is added to the first disk's
# (`,snapshot=on`).
machine_words() {
    cpu=SapphireRapids
    qemu-system-x86_64 -cpu help | grep -q "$cpu" || cpu=Icelake-Server,level=0x20
    echo "-accel tcg,thread=single -machine q35 -cpu $cpu -bios qboot.rom -nodefaults -display none" \
        "-kernel $cache/vmlinux-$1 -initrd $cache/systemd-$1.initramfs" \
        "-drive file=$2,if=virtio,format=raw,cache=unsafe${4:-} -drive file=$3,if=virtio,format=raw,readonly=on" \
        "$(grep -v '^#' "$vm/machines/systemd")"
}
# No suite here: the command line is part of the saved machine.
machine_command_line="console=ttyS0 panic=-1 quiet mitigations=off nokaslr no_timer_check tsc=reliable cryptomgr.notests random.trust_cpu=on audit=0 apparmor=0 systemd.show_status=0 truepin.machine=systemd"

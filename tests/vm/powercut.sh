#!/bin/sh
# powercut.sh [-k SERIES] [-m MACHINE] [-t SECONDS] [-p PREFIX] [SUITE]
#
# A machine whose power is cut CUTS times (default 10) while owners come and go, on one disk with ext4; then a last life
# in which it may end. Every life has to start on what the one before left, and to find what was acknowledged or later
# (tests/src/guest/suites/powercut.rs). The result is that of the last life, or of the one that failed. All of them together
# may take SECONDS.
#
# A cut is SIGKILL for QEMU: what the guest had not yet given to its disk is lost (dirty pages, the journal's running
# transaction), what it had given is in the host's page cache and stays (cache=writeback, so the guest has to flush).
# A snapshot to resume from would save the boots, and with them what a cut is about: the mount that replays the journal.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

kernel=$test_series
machine=eight
limit=900
prefix=
while getopts k:m:t:p: option; do
    case $option in
        k) kernel=$OPTARG ;;
        m) machine=$OPTARG ;;
        t) limit=$OPTARG ;;
        p) prefix=$OPTARG ;;
        *) die "usage: powercut.sh [-k SERIES] [-m MACHINE] [-t SECONDS] [-p PREFIX]" ;;
    esac
done
cuts=${CUTS:-10}
disk=$cache/powercut-$kernel.img
log=$cache/logs/powercut-$kernel-$machine.log
trap 'rm -f "$disk"' EXIT
rm -f "$disk"
truncate -s 64M "$disk"
PATH=$PATH:/usr/sbin:/sbin mkfs.ext4 -q -F "$disk" || die "mkfs.ext4 failed (Debian: e2fsprogs)"

end=$(($(date +%s) + limit))
# boot LIFE [OPTION...]
boot() {
    life=$1
    shift
    left=$((end - $(date +%s)))
    # What is late is for boot.sh to say.
    [ "$left" -gt 0 ] || left=1
    APPEND="truepin.life=$life truepin.acked=$acked ${APPEND:-}" "$vm/boot.sh" -k "$kernel" -m "$machine" \
        -t "$left" -p "$prefix" "$@" powercut \
        -drive "if=none,id=state,file=$disk,format=raw,cache=writeback" -device nvme,drive=state,serial=state
}

acked=
life=1
while [ "$life" -le "$cuts" ]; do
    # After another number of changes each time, and at another point of the next: 0 to 390 ms later.
    boot "$life" -c $((2 + life * 7 % 5)) -d "0.$((life * 37 % 40 + 10))" || exit 1
    # A line that was cut is none.
    acked=$(sed -n 's|^# ACK \([0-9][0-9]*[/=c0-9,-]*\)\r*$|\1|p' "$log" | tail -1)
    [ -n "$acked" ] || die "life $life acknowledged nothing; its log: $log"
    life=$((life + 1))
done
echo "${prefix:+$prefix }# $cuts lives ended with a power cut"
boot last

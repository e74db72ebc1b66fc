#!/bin/sh
# boot.sh [-q] [-k SERIES] [-m MACHINE] [-t SECONDS] [-p PREFIX] [-c ACKS [-d DELAY]] SUITE [QEMU ARGUMENT...]
#
# Boots one virtual machine, shows what the suite says as it says it, and ends with status 0 only if the suite reported
# at least one scenario passed and none failed. All of it is in $TRUEPIN_CACHE/vm/logs/SUITE-SERIES-MACHINE.{log,console}.
#
# -q leaves out the lines with the results (a story ends by itself). -p puts a text before every line.
# -c cuts the power (SIGKILL for QEMU) DELAY seconds (default 0) after the suite has said `# ACK` so many times; the
# status is 0 when that is how it ended, and not by a result of its own.
# Environment: ONLY (scenarios whose name contains it, `_` for a space), APPEND (more kernel command line).
#
# Emulation (TCG) on purpose, also where /dev/kvm exists: on hosts that are virtual machines themselves KVM may be there
# and not work, and results must not depend on it. thread=single: virtual CPUs that spin on each other at boot cost
# twice the time with a thread each. qboot and a PVH kernel skip 2 s of firmware and 2.5 s of decompression.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

kernel=$test_series
machine=standard
limit=300
prefix=
quiet=
cut=
delay=0
while getopts qk:m:t:p:c:d: option; do
    case $option in
        q) quiet='/^RESULT passed=/d;/^ok /d;' ;;
        k) kernel=$OPTARG ;;
        m) machine=$OPTARG ;;
        t) limit=$OPTARG ;;
        p) prefix=$OPTARG ;;
        c) cut=$OPTARG ;;
        d) delay=$OPTARG ;;
        *) die "usage: boot.sh [-q] [-k SERIES] [-m MACHINE] [-t SECONDS] [-p PREFIX] [-c ACKS [-d DELAY]] SUITE [QEMU ARGUMENT...]" ;;
    esac
done
shift $((OPTIND - 1))
[ $# -gt 0 ] || die "which suite?"
suite=$1
shift

for file in "$cache/vmlinux-$kernel" "$cache/initramfs" "$vm/machines/$machine"; do
    [ -s "$file" ] || die "$file is missing (make setup; tests/vm/build.sh)"
done
# The whole topology is only emulated for Intel models whose CPUID has leaf 0x1f; QEMU 7.2 knows an older one.
cpu=SapphireRapids
qemu-system-x86_64 -cpu help | grep -q "$cpu" || cpu=Icelake-Server,level=0x20

mkdir -p "$cache/logs"
name=$suite-$kernel-$machine
log=$cache/logs/$name.log
console=$cache/logs/$name.console
fifo=$(mktemp -u "$cache/logs/fifo.XXXXXX")
rm -f "$log" "$console" "$console.pid" "$console.cut"
mkfifo "$fifo"
colour=0
if [ -t 1 ] && [ -z "${NO_COLOR:-}" ]; then colour=1; fi

# Held open here, so that a QEMU that fails before it opens the pipe does not leave the reader waiting; and closed with
# `exec` in the readers, since the shell keeps a copy open where a redirection only lasts for a command.
exec 3<>"$fifo"
(exec 3>&- && exec tee "$log" <"$fifo") | (exec 3>&- && exec sed -u "${quiet}s/^/${prefix:+$prefix }/") &
shown=$!
# Whoever ends this script early must end QEMU as well.
trap 'rm -f "$fifo"; [ -z "${vm_pid:-}" ] || kill "$vm_pid" 2>/dev/null || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
# shellcheck disable=SC2046
timeout "$limit" qemu-system-x86_64 -accel tcg,thread=single -machine q35 -cpu "$cpu" -bios qboot.rom \
    -pidfile "$console.pid" -nodefaults -no-reboot -display none -serial "file:$console" -serial "file:$fifo" \
    -kernel "$cache/vmlinux-$kernel" -initrd "$cache/initramfs" \
    -append "console=ttyS0 panic=-1 quiet mitigations=off nokaslr no_timer_check tsc=reliable cryptomgr.notests random.trust_cpu=on audit=0 truepin.suite=$suite truepin.machine=$machine truepin.only=${ONLY:-} truepin.colour=$colour ${APPEND:-}" \
    $(grep -v '^#' "$vm/machines/$machine") "$@" </dev/null 3>&- >"$console.qemu" 2>&1 &
vm_pid=$!
if [ -n "$cut" ]; then
    (
        exec 3>&-
        while kill -0 "$vm_pid" 2>/dev/null; do
            if [ "$(grep -ac '^# ACK ' "$log" 2>/dev/null)" -ge "$cut" ]; then
                sleep "$delay"
                : >"$console.cut"
                kill -KILL "$(cat "$console.pid")"
                break
            fi
            sleep 0.05
        done
    ) &
fi
status=0
wait "$vm_pid" || status=$?
vm_pid=
exec 3>&-
wait "$shown"

result=$(grep -a '^RESULT ' "$log" | tail -1)
[ ! -e "$console.cut" ] || [ -n "$result" ] || exit 0
case $result in
    "RESULT passed="[1-9]*" failed=0 skipped="*)
        [ "$status" -ne 0 ] || exit 0
        echo "# $name: QEMU ended with status $status after the result"
        ;;
esac
if [ -z "$result" ]; then
    why="QEMU ended with status $status"
    [ "$status" -ne 124 ] || why="not done after $limit s"
    { grep -v "TCG doesn't support" "$console.qemu" | head -5; tail -25 "$console" | tr -d '\r'; } | sed 's/^/# console: /'
    # The tally counts it as a failure, and so does the table.
    echo "RESULT none: $name: $why" | tee -a "$log" | sed "s/^/${prefix:+$prefix }/"
fi
exit 1

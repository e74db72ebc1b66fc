#!/bin/sh
# suites.sh [SUITE...]: boots what `matrix` holds (or of the suites named), two machines at a time, the longest first; at
# the end the table of what was seen on which kernel, on the terminal and in $TRUEPIN_CACHE/vm/logs/table. A suite or a
# machine with a script of its own name boots as that says. Status 0 when all passed, and the table is what it was before.
#
# KERNELS: series, or `all` (default: that of `make test`). VM_JOBS: how many at a time; each keeps one host core busy.
# ONLY: scenarios whose name contains it.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

jobs=${VM_JOBS:-$(nproc)}
[ "$jobs" -le 2 ] || [ -n "${VM_JOBS:-}" ] || jobs=2
# shellcheck disable=SC2086
kernels=$(series ${KERNELS:-})
boots=$(awk -v names=" $* " -v kernels=" $kernels " '!/^#/ && NF && (names == "  " || index(names, " " $1 " ")) {
    for (i = 4; i <= NF; i++) if (index(kernels, " " $i " ")) print $1, $i, $2, $3
}' "$vm/matrix" | sort -s -k4,4nr)
[ -n "$boots" ] || die "no line in tests/vm/matrix for: ${*:-every suite} on $kernels"
mkdir -p "$cache/logs"
# Nothing of an earlier run may be taken for this one's.
printf '%s\n' "$boots" | while read -r suite kernel machine _; do
    rm -f "$cache/logs/$suite-$kernel-$machine.log" "$cache/logs/$suite-$kernel-$machine.took"
done
say "booting $(printf '%s\n' "$boots" | wc -l) virtual machines, $jobs at a time; logs in $cache/logs"
start=$(date +%s)
status=0
# shellcheck disable=SC2016
printf '%s\n' "$boots" | xargs -P "$jobs" -L 1 sh -c '
    script=$0/boot.sh
    for own in "$0/$2.sh" "$0/$4.sh"; do [ ! -x "$own" ] || script=$own; done
    start=$(date +%s)
    status=0
    "$script" -k "$3" -m "$4" -t "$5" -p "[$2 $3 $4]" "$2" || status=$?
    echo $(($(date +%s) - start)) >"$1/$2-$3-$4.took"
    exit "$status"' "$vm" "$cache/logs" || status=1
took=$(($(date +%s) - start))
printf '%s\n' "$boots" | "$vm/table" "$cache" >"$cache/logs/table" || status=1
cat "$cache/logs/table"
echo "$kernels: took $((took / 60)) min $((took % 60)) s, $jobs at a time; the table: $cache/logs/table"
exit "$status"

#!/bin/sh
# suites.sh [SUITE...]: boots every line of `matrix` (or those of the suites named), two machines at a time. A suite with
# a script of its own name boots as that says.
#
# VM_JOBS: how many at a time; each keeps one host core busy. ONLY: scenarios whose name contains it.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"

jobs=${VM_JOBS:-$(nproc)}
[ "$jobs" -le 2 ] || [ -n "${VM_JOBS:-}" ] || jobs=2
wanted=$(awk -v names=" $* " '!/^#/ && NF && (names == "  " || index(names, " " $1 " "))' "$vm/matrix")
[ -n "$wanted" ] || die "no line in tests/vm/matrix for: $*"
say "booting $(printf '%s\n' "$wanted" | wc -l) virtual machines, $jobs at a time; logs in $cache/logs"
printf '%s\n' "$wanted" | xargs -P "$jobs" -L 1 sh -c \
    'script=$0/boot.sh; [ ! -x "$0/$1.sh" ] || script=$0/$1.sh
    exec "$script" -k "$2" -m "$3" -t "$4" -p "[$1 $2 $3]" "$1"' "$vm"

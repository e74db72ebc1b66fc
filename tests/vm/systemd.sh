#!/bin/sh
# systemd.sh [-k SERIES] [-m systemd] [-t SECONDS] [-p PREFIX] SUITE
#
# Takes the saved host with systemd up once for each scenario of a suite (so each finds it as it was left at boot, with a
# disk of its own), and adds up what they say, as boot.sh does of one machine. All of them may take SECONDS. A scenario may
# reboot its machine (tests/src/guest/host.rs). Environment: ONLY, as for boot.sh.
#
# Orders are a disk that is read after the machine was taken up: binaries, Makefile, README and deploy/ of this tree.
# shellcheck source=lib.sh
. "$(dirname "$0")/lib.sh"
# shellcheck source=systemd-lib.sh
. "$vm/systemd-lib.sh"

kernel=$test_series
limit=900
prefix=
while getopts k:m:t:p: option; do
    case $option in
        k) kernel=$OPTARG ;;
        m) [ "$OPTARG" = systemd ] || die "the machine with systemd is \"systemd\", not \"$OPTARG\"" ;;
        t) limit=$OPTARG ;;
        p) prefix=$OPTARG ;;
        *) die "usage: systemd.sh [-k SERIES] [-t SECONDS] [-p PREFIX] SUITE" ;;
    esac
done
shift $((OPTIND - 1))
[ $# -eq 1 ] || die "which suite?"
suite=$1
initramfs=$cache/initramfs
[ -s "$initramfs" ] || die "$initramfs is missing (tests/vm/build.sh)"
"$vm/image.sh" -k "$kernel" || die "no machine"

mkdir -p "$cache/logs"
name=$suite-$kernel-systemd
log=$cache/logs/$name.log
console=$cache/logs/$name.console
: >"$log"
: >"$console"
work=$(mktemp -d "$cache/$name.XXXXXX")
pid=
trap '[ -z "$pid" ] || kill "$pid" 2>/dev/null || true; rm -rf "$work"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
say_all() { tee -a "$log" | sed -u "s/^/${prefix:+$prefix }/"; }

# The binaries that build.sh packed.
(cd "$work" && cpio -i --quiet -d 'bin/*' <"$initramfs")
scenarios=$("$work/bin/truepin-guest" scenarios "$suite") || die "no suite $suite"
end=$(($(date +%s) + limit))
passed=0
failed=0
skipped=0
number=0
while read -r scenario; do
    case $scenario in *"${ONLY:-}"*) ;; *) continue ;; esac
    number=$((number + 1))
    orders=$work/orders
    rm -rf "$orders" "$work/out"
    mkdir -p "$orders/bin" "$orders/truepin"
    ln "$work/bin/truepin" "$work/bin/truepin-guest" "$orders/bin/"
    cp -r "$repo/Makefile" "$repo/README.md" "$repo/deploy" "$orders/truepin/"
    printf '#!/bin/sh\nexec /rig/bin/truepin-guest host %s %s %s\n' "$suite" "$number" "$scenario" >"$orders/start"
    chmod 755 "$orders/start"
    # 1 MiB before the archive, whose first block is the word.
    { printf truepin; } >"$work/disk"
    # Dated before the machine was saved, whose clock went on from there.
    tar -c -f "$work/archive" --mtime=2020-01-01 -C "$orders" .
    dd if="$work/archive" of="$work/disk" bs=1M seek=1 status=none
    truncate -s "$orders_size" "$work/disk"
    left=$((end - $(date +%s)))
    [ "$left" -gt 0 ] || left=1
    status=0
    # shellcheck disable=SC2046
    timeout "$left" qemu-system-x86_64 \
        $(machine_words "$kernel" "$cache/systemd-$kernel.disk" "$work/disk" ,snapshot=on) \
        -append "$machine_command_line" -serial "file:$work/console" -serial "file:$work/out" \
        -chardev null,id=monitor -mon chardev=monitor,mode=readline \
        -incoming "exec:cat $cache/systemd-$kernel.state" </dev/null >"$work/qemu" 2>&1 &
    pid=$!
    # As it is said.
    tail -q -n +1 -F --pid="$pid" -s 0.2 "$work/out" 2>/dev/null | grep -av --line-buffered '^RESULT ' | say_all
    wait "$pid" || status=$?
    pid=
    cat "$work/console" >>"$console"
    result=$(grep -a '^RESULT passed=' "$work/out" | tail -1)
    if [ -z "$result" ]; then
        why="QEMU ended with status $status"
        [ "$status" -ne 124 ] || why="not done within the $limit s of all"
        { grep -v "TCG doesn't support" "$work/qemu" | head -5; tail -25 "$work/console" | tr -d '\r'; } |
            sed 's/^/# console: /' | say_all
        echo "not ok $number - $(echo "$scenario" | tr _ ' ') # no result: $why" | say_all
        result="RESULT passed=0 failed=1 skipped=0"
    fi
    # shellcheck disable=SC2086
    set -- $result
    passed=$((passed + ${2#passed=}))
    failed=$((failed + ${3#failed=}))
    skipped=$((skipped + ${4#skipped=}))
done <<EOT
$scenarios
EOT
[ "$number" -gt 0 ] || die "no scenario of $suite contains \"${ONLY:-}\""
echo "RESULT passed=$passed failed=$failed skipped=$skipped" | say_all
[ "$passed" -gt 0 ] && [ "$failed" -eq 0 ]

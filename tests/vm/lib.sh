# shellcheck shell=sh
# Shared by the scripts in this folder: paths, messages, the private apt configuration. Sourced, POSIX shell.
#
# TRUEPIN_CACHE (default: .cache in the repository) holds everything that is downloaded or built for the rig.

set -eu
vm=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$vm/../.." && pwd)
cache=${TRUEPIN_CACHE:-$repo/.cache}
mkdir -p "$cache/vm"
cache=$(cd "$cache" && pwd)/vm

# The kernel of `make test`, and of a single boot that names none.
test_series=6.12
# series [SERIES...]: themselves; `all`: those of the matrix; none: that of `make test`.
series() {
    case "${*:-$test_series}" in
        all) awk '!/^#/ && NF { for (i = 4; i <= NF; i++) print $i }' "$vm/matrix" | sort -Vu | tr '\n' ' ' ;;
        *) printf '%s ' "${@:-$test_series}" ;;
    esac
}

say() { printf '%s\n' "==> $*"; }
warn() { printf '%s\n' "==> $*" >&2; }
die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

# The machine's own Debian mirrors, "URI SUITE" a line, as its apt configuration has them. A machine without package
# lists (a fresh container) has to fetch them once, into our cache, to know which of its sources are Debian's.
debian_sources() {
    [ -s "$cache/debian-sources" ] || {
        command -v apt-get >/dev/null || die "this needs Debian's apt-get (Debian 12 or newer)"
        ask_apt >"$cache/debian-sources.new"
        if [ ! -s "$cache/debian-sources.new" ]; then
            mkdir -p "$cache/apt-own/lists/partial"
            own="-o Dir::State::lists=$cache/apt-own/lists -o Acquire::Check-Valid-Until=false"
            # Other sources of the machine may be out of reach; only Debian's matter.
            # shellcheck disable=SC2086
            apt-get update -qq $own >&2 || warn "some package sources of this machine cannot be reached"
            # shellcheck disable=SC2086
            ask_apt $own >"$cache/debian-sources.new"
        fi
        [ -s "$cache/debian-sources.new" ] || die "no Debian package source in this machine's apt configuration"
        mv "$cache/debian-sources.new" "$cache/debian-sources"
    }
    cat "$cache/debian-sources"
}
ask_apt() {
    apt-get indextargets "$@" --format '$(ORIGIN) $(COMPONENT) $(REPO_URI) $(RELEASE)' 'Created-By: Packages' |
        awk '$1 == "Debian" && $2 == "main" { print $3, $4 }' | sort -u
}

codename() { . /etc/os-release && printf '%s' "${VERSION_CODENAME:?}"; }
# The mirror that serves the plain suite, and so its backports and all other suites.
mirror() { debian_sources | awk -v c="$(codename)" '$2 == c { print $1; exit }'; }

# private_apt NAME "URI SUITE [SUITE...]"...: a configuration of its own under the cache, with its own lists, sources
# and preferences, so that neither are the machine's lists touched nor can a newer suite get into them.
# Sets APT_CONFIG.
private_apt() {
    dir=$cache/apt-$1
    shift
    mkdir -p "$dir/lists/partial" "$dir/archives/partial" "$dir/none"
    for source in "$@"; do
        for suite in ${source#* }; do
            # A mirror of our own choosing may serve Release files that have run out; signatures are still checked.
            echo "deb [check-valid-until=no signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] ${source%% *} $suite main"
        done
    done >"$dir/sources.list.new"
    cat >"$dir/apt.conf" <<EOF
Dir::Etc::sourcelist "$dir/sources.list";
Dir::Etc::sourceparts "$dir/none";
Dir::Etc::preferences "$dir/none/preferences";
Dir::Etc::preferencesparts "$dir/none";
Dir::State::lists "$dir/lists";
Dir::Cache::archives "$dir/archives";
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Acquire::Languages "none";
APT::Sandbox::User "root";
EOF
    export APT_CONFIG="$dir/apt.conf"
    if ! cmp -s "$dir/sources.list.new" "$dir/sources.list" || ! ls "$dir"/lists/*Packages* >/dev/null 2>&1 ||
        [ -n "$(find "$dir/apt.updated" -mmin +720 2>/dev/null)" ]; then
        mv "$dir/sources.list.new" "$dir/sources.list"
        say "fetching package lists: $(sed -n 's/.* \([a-z-]*\) main/\1/p' "$dir/sources.list" | tr '\n' ' ')"
        # A suite that a mirror no longer has must not take the others with it.
        apt-get update -qq || warn "some of these lists cannot be fetched; going on with the rest"
        touch "$dir/apt.updated"
    fi
}

# install_packages PACKAGE...: on this machine, from its own suites, so that versions fit what is installed, and on
# Debian 12 from the backports of the same release. In a shell of its own, for the names' sake.
install_packages() (
    packages=$*
    say "installing: $packages"
    release=$(codename)
    backports=
    [ "$release" != bookworm ] || backports=$release-backports
    set --
    while read -r uri suite; do
        case $suite in "$release" | "$release"-*) set -- "$@" "$uri $suite" ;; esac
    done <<EOF
$(debian_sources)
EOF
    [ -z "$backports" ] || set -- "$@" "$(mirror) $backports"
    private_apt host "$@"
    root=
    [ "$(id -u)" = 0 ] || root=sudo
    [ -z "$root" ] || command -v sudo >/dev/null || die "as root, please: apt-get install $packages"
    {
        status=0
        # shellcheck disable=SC2086
        $root env APT_CONFIG="$APT_CONFIG" DEBIAN_FRONTEND=noninteractive apt-get install -y -q \
            --no-install-recommends ${backports:+-t $backports} $packages || status=$?
        echo "apt-get ended with status $status"
    } 2>&1 | tee "$cache/install.log" | sed -un '/^\(Get:\|Setting up\)/s/^/    /p'
    grep -qx 'apt-get ended with status 0' "$cache/install.log" ||
        { tail -20 "$cache/install.log" >&2; die "installing $packages failed; all of it: $cache/install.log"; }
)

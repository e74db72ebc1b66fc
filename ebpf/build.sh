#!/bin/bash
# Usage: ebpf/build.sh         builds the kernel half into ebpf/prebuilt/ and records what it was built from
#        ebpf/build.sh lint    runs clippy on it instead, warnings are errors
#
# Needs rustup's or another rustc with LLVM 22. Gets what is missing: the sources of `core` for exactly that rustc, and
# bpf-linker. Tools and intermediate files are kept in $TRUEPIN_CACHE (default .cache/ of the checkout), so a second
# run takes seconds. The same sources and tools give the same bytes, wherever the checkout is.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)
cache=${TRUEPIN_CACHE:-$repo/.cache}
out=$repo/ebpf/prebuilt
# 0.11 and later need a system LLVM's development files; 0.10.4 uses rustc's own libLLVM, of version 22 only.
linker=0.10.4
llvm=22

die() { echo "ebpf/build.sh: $*" >&2; exit 1; }

[[ $(rustc -vV) =~ LLVM\ version:\ ([0-9]+) ]] || die "rustc does not say which LLVM it has"
[ "${BASH_REMATCH[1]}" = $llvm ] ||
    die "bpf-linker $linker needs a rustc with LLVM $llvm (1.95 has it), this one has ${BASH_REMATCH[1]}"
release=$(rustc -vV | sed -n 's/^release: //p')
host=$(rustc -vV | sed -n 's/^host: //p')
sysroot=$(rustc --print sysroot)

# Debian's package of the same version, through an apt configuration of our own: the machine's stays as it is. The
# mirror is the machine's.
rust_src_from_debian() {
    command -v apt-get >/dev/null || die "no rust-src for $release: rustup has none, and this is not Debian"
    local mirror dir=$cache/apt deb
    mirror=$(apt-get indextargets --format '$(LABEL)|$(REPO_URI)' 'Created-By: Packages' | sed -n 's/^Debian|//p' | head -1)
    [ -n "$mirror" ] || die "no rust-src for $release: rustup has none, and no apt source is Debian's"
    mkdir -p "$dir/lists/partial" "$dir/empty"
    cat >"$dir/debian.sources" <<-END
	Types: deb
	URIs: $mirror
	Suites: trixie trixie-backports forky
	Components: main
	Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
	END
    cat >"$dir/apt.conf" <<-END
	Dir::Etc::sourcelist "$dir/debian.sources";
	Dir::Etc::sourceparts "$dir/empty";
	Dir::Etc::preferences "$dir/none";
	Dir::Etc::preferencesparts "$dir/empty";
	Dir::State::lists "$dir/lists";
	Dir::Cache::pkgcache "";
	Dir::Cache::srcpkgcache "";
	Acquire::Check-Valid-Until "false";
	Acquire::Languages "none";
	APT::Sandbox::User "root";
	END
    APT_CONFIG=$dir/apt.conf apt-get update -qq
    deb=$(APT_CONFIG=$dir/apt.conf apt-cache madison rust-src |
        awk -F'|' -v v="$release+" '{gsub(/ /, "", $2)} index($2, v) == 1 {print $2; exit}')
    [ -n "$deb" ] || die "no rust-src $release in rustup or in Debian's suites"
    rm -rf "$dir/src" && mkdir "$dir/src"
    (cd "$dir/src" && APT_CONFIG=$dir/apt.conf apt-get download -qq "rust-src=$deb" && dpkg-deb -x rust-src_*.deb x)
    mkdir -p "$sysroot/lib/rustlib/src/rust"
    cp -r "$dir/src/x/usr/src/rustc-$release/library" "$sysroot/lib/rustlib/src/rust/library.new"
    mv "$sysroot/lib/rustlib/src/rust/library.new" "$sysroot/lib/rustlib/src/rust/library"
    rm -rf "$dir/src"
}

core=$sysroot/lib/rustlib/src/rust/library/core/src/lib.rs
if ! [ -f "$core" ]; then
    echo "ebpf/build.sh: getting rust-src $release" >&2
    command -v rustup >/dev/null && rustup component add rust-src >&2 || true
    [ -f "$core" ] || rust_src_from_debian
    [ -f "$core" ] || die "rust-src was installed, but $core is not there"
fi

tools=$cache/bpf-linker-$linker
if ! [ -x "$tools/bin/bpf-linker" ]; then
    echo "ebpf/build.sh: building bpf-linker $linker (2 to 4 CPU minutes, once)" >&2
    cargo install bpf-linker --version $linker --locked --root "$tools" --target-dir "$tools/build"
    rm -rf "$tools/build"
fi

objcopy=$sysroot/lib/rustlib/$host/bin/rust-objcopy
[ -x "$objcopy" ] || objcopy=$(command -v llvm-objcopy) || die "neither rust-objcopy nor llvm-objcopy is there"

cd "$repo"
cargo fetch --quiet
# .BTF names source files. The last prefix that fits wins; the registry's folder bears a host name. No folder has
# these names, so that the compiler cannot find the sources again from here and copy their text.
cargo_home=${CARGO_HOME:-$HOME/.cargo}
flags=(--cfg=bpf_target_arch=\"x86_64\" -Clink-arg=--btf
    "--remap-path-prefix=$cargo_home=cargo-home" "--remap-path-prefix=$sysroot=rust" "--remap-path-prefix=$repo=truepin")
for index in "$cargo_home"/registry/src/*; do
    flags+=("--remap-path-prefix=$index=crates")
done
# .BTF is made from debug information. One unit keeps the programs together; LTO is bpf-linker's business.
export RUSTC_BOOTSTRAP=1 CARGO_TARGET_DIR=$cache/bpf-target PATH=$tools/bin:$PATH
export CARGO_PROFILE_RELEASE_OPT_LEVEL=3 CARGO_PROFILE_RELEASE_DEBUG=2 CARGO_PROFILE_RELEASE_CODEGEN_UNITS=1
export CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_STRIP=none CARGO_PROFILE_RELEASE_PANIC=abort
CARGO_ENCODED_RUSTFLAGS=$(IFS=$'\x1f'; echo "${flags[*]}")
export CARGO_ENCODED_RUSTFLAGS
what=(-p truepin-ebpf --release --target bpfel-unknown-none -Z build-std=core)
if [ "${1:-}" = lint ]; then
    exec cargo clippy "${what[@]}" -- -D warnings
fi
cargo build "${what[@]}"
unset RUSTC_BOOTSTRAP CARGO_ENCODED_RUSTFLAGS

mkdir -p "$out"
# rustc's own objcopy finds rustc's LLVM only when told where.
LD_LIBRARY_PATH=$sysroot/lib "$objcopy" --strip-debug "$CARGO_TARGET_DIR/bpfel-unknown-none/release/truepin" "$out/truepin.bpf.o"
chmod 644 "$out/truepin.bpf.o"
rustc --edition 2024 -o "$cache/bpf-hash" ebpf/hash.rs
"$cache/bpf-hash" "$repo" >"$out/truepin.bpf.hash"
{
    rustc --version
    echo "LLVM $(rustc -vV | sed -n 's/^LLVM version: //p')"
    bpf-linker --version
} >"$out/tools.txt"
ls -l "$out"

# The whole interface for contributors. On a fresh Debian 12 (or newer) machine with rustup, `make demo` and
# `make test` are one command each: every target calls what it needs of `setup`, which does nothing when all is there.
#
# TRUEPIN_CACHE (default: .cache here) holds what is downloaded and built beside cargo's own target folder.

TRUEPIN_CACHE ?= $(CURDIR)/.cache
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
DESTDIR ?=
export TRUEPIN_CACHE

sbindir = $(DESTDIR)$(PREFIX)/sbin
unitdir = $(DESTDIR)$(PREFIX)/lib/systemd/system
confdir = $(DESTDIR)$(SYSCONFDIR)/truepin

.DEFAULT_GOAL := help
.PHONY: help setup demo test vm-test bpf bench lint build install uninstall

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | awk -F'|' '{ printf "make %-10s %s\n", $$1, $$2 }'

setup: ## what the virtual machines need: QEMU and small tools (Debian), the kernel of `make test` (or KERNELS); SYSTEMD=1: a host with systemd too, else made when a suite needs it
	@tests/vm/setup.sh $(KERNELS)

demo: setup ## see it work: a NUMA machine in QEMU, workloads, an intruder, a crash of the agent
	@tests/vm/build.sh
	@tests/vm/boot.sh -q -t 600 demo

test: setup ## every test, on this machine and on real kernels in virtual machines; the last line counts them
	@tests/run

vm-test: KERNELS ?= all
vm-test: setup ## the suites on every kernel, and a table; KERNELS="6.1 7", SUITE=name, ONLY=part_of_a_scenario's_name choose
	@tests/vm/build.sh
	@KERNELS="$(KERNELS)" tests/vm/suites.sh $(SUITE)

bpf: ## build the kernel half anew into ebpf/prebuilt (first time: minutes, for its linker)
	@ebpf/build.sh

bench: ## what reading a machine, saving the record, a run of the kernel half (as root) and the kubelet's decisions cost on this machine
	@built=$$(tests/build) && tests/discovery "$$built/truepin"
	@. tests/cargo.env && cargo run --release -p truepin-tests --example record_cost
	@. tests/cargo.env && cargo run --release -p truepin-agent --example switch_cost
	@. tests/cargo.env && cargo run --release -p truepin-tests --example kubelet_cost

lint: ## rustfmt, clippy, licences and sources of dependencies, traces of the build machine
	@tests/lint

build: ## the static binaries that the tests use
	@tests/build

install: ## binary, unit and configuration below PREFIX (/usr/local), SYSCONFDIR (/etc) and DESTDIR; BUILT=folder of a binary that was built elsewhere
	@built=$${BUILT:-$$(tests/build dist)} && [ -n "$$built" ] && echo "install $(sbindir)/truepin" && install -D -m 755 "$$built/truepin" $(sbindir)/truepin
	install -d $(unitdir) $(confdir)
	sed 's|/usr/local/sbin/truepin|$(PREFIX)/sbin/truepin|g' deploy/truepin.service >$(unitdir)/truepin.service.new
	mv $(unitdir)/truepin.service.new $(unitdir)/truepin.service
	install -m 644 deploy/truepin.slice $(unitdir)/truepin.slice
	@if [ -e $(confdir)/config.toml ]; then echo "kept: $(confdir)/config.toml"; \
	else echo "install -m 644 deploy/config.toml $(confdir)/config.toml"; \
		install -m 644 deploy/config.toml $(confdir)/config.toml; fi
	@[ -n "$(DESTDIR)" ] || ! [ -d /run/systemd/system ] || systemctl daemon-reload

# A stopped agent is started for it. Nothing is removed unless all is back, except with FORCE=1.
uninstall: ## every cpuset file as it was found, then what install put in place; an edited configuration and the record stay
	@if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ] && [ -e $(unitdir)/truepin.service ]; then \
		set -x; \
		{ systemctl start truepin.service && $(sbindir)/truepin release --all; } || [ -n "$(FORCE)" ] || { \
			echo "error: cpuset files are not as they were found; FORCE=1 uninstalls all the same" >&2; exit 1; }; \
		systemctl disable --now truepin.service; \
	fi
	rm -f $(sbindir)/truepin $(unitdir)/truepin.service $(unitdir)/truepin.slice
	@if ! [ -e $(confdir)/config.toml ]; then :; \
	elif cmp -s deploy/config.toml $(confdir)/config.toml; then \
		echo "rm $(confdir)/config.toml"; rm $(confdir)/config.toml; rmdir --ignore-fail-on-non-empty $(confdir); \
	else echo "kept, it was edited: $(confdir)/config.toml"; fi
	@[ -n "$(DESTDIR)" ] || ! [ -d /run/systemd/system ] || systemctl daemon-reload

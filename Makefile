# Thin on purpose: the work is in `cargo xtask` (crates/xtask), which also sets the machine up.

.DEFAULT_GOAL := help
.PHONY: help demo check test bench sim lab lab-shell lab-debug deb install uninstall soak tidy fmt clean toolchain

# Passed on to `vellum demo` or `vellum bench`: make demo ARGS="--dir /usr/share --limit 256MiB"
ARGS ?=

help:
	@echo "make demo    store the files under /usr, compare them, update them, kill the process that"
	@echo "             updates (kill -9), recover, show that no acknowledged commit is missing"
	@echo "             ARGS=\"--dir DIR --limit 512MiB\" and so on; all of them: make demo ARGS=--help"
	@echo "make check   what to run after each change: lints, tests, a short model check, and"
	@echo "             the module on one kernel if it has changed (some minutes)"
	@echo "make test    format, rules, lints, all tests, model check, documentation (minutes)"
	@echo "make bench   measurements beside other engines; ARGS=\"table2 --quick\"; alone: lists them"
	@echo "             with RocksDB: make bench ROCKSDB=1 ARGS=..."
	@echo "make sim     simulated crashes of stores, from seeds; ARGS=\"--seeds 1000\", ARGS=--help"
	@echo "make lab     the module and its tests on stock Debian kernels, in an emulator; there, too,"
	@echo "             on exmap, those of vm, pool and engine, and a short TPC-C; some of it:"
	@echo "             make lab KERNEL=6.12 PROCESSORS=1,4 PACKAGE=vellum-pool TEST=batches"
	@echo "             another machine: BOOT=\"pti=on\" MODULE=\"flush=exported\" PROCESSORS=4"
	@echo "             the module's fuzzer alone, for ten minutes: make lab FUZZ=600"
	@echo "             an experiment there: make lab BENCH=exmap-pool; COUNT=1 counts instructions"
	@echo "make lab-shell  a shell in a guest, with the module; FILES=\"a b\" brings programs along"
	@echo "make lab-debug  the same on a kernel that checks itself; the first time builds it (an hour)"
	@echo "make deb     the Debian package of the module, for DKMS, built and checked"
	@echo "make install  the program, its manual pages, the libraries for C and for preloading, and"
	@echo "             units of systemd; PREFIX=/usr DESTDIR=folder; make uninstall removes them"
	@echo "make soak    the long tests, and the module's fuzzer (two hours or more)"
	@echo "make tidy    the project's own rules alone"
	@echo "make fmt     format the code"
	@echo "make clean   remove what was built"

demo: toolchain
	@cargo xtask demo $(ARGS)

check: toolchain
	@cargo xtask check

test: toolchain
	@cargo xtask test

bench: toolchain
	@cargo xtask bench $(if $(ROCKSDB),--rocksdb) $(ARGS)

sim: toolchain
	@cargo xtask sim $(ARGS)

lab: toolchain
	@cargo xtask lab $(if $(KERNEL),--kernel $(KERNEL)) \
	    $(if $(PROCESSORS),--processors $(PROCESSORS)) $(foreach name,$(PACKAGE),--package $(name)) \
	    $(if $(MEMORY),--memory $(MEMORY)) $(if $(LEVELS),--levels $(LEVELS)) \
	    $(if $(BOOT),--boot "$(BOOT)") $(if $(MODULE),--module "$(MODULE)") \
	    $(if $(COUNT),--count-instructions) $(if $(BENCH),--bench $(BENCH)) \
	    $(if $(FUZZ),--fuzz $(FUZZ)) $(TEST) \
	    $(if $(ARGS),-- $(ARGS))

lab-shell: toolchain
	@cargo xtask lab --shell $(if $(KERNEL),--kernel $(KERNEL)) \
	    $(if $(PROCESSORS),--processors $(PROCESSORS)) \
	    $(if $(BOOT),--boot "$(BOOT)") $(if $(MODULE),--module "$(MODULE)") \
	    $(foreach file,$(FILES),--file $(file))

lab-debug:
	@$(MAKE) --no-print-directory lab KERNEL=debug

deb: toolchain
	@cargo xtask deb

install: toolchain
	@cargo xtask install $(if $(PREFIX),--prefix $(PREFIX)) $(if $(DESTDIR),--destdir $(DESTDIR))

uninstall: toolchain
	@cargo xtask uninstall $(if $(PREFIX),--prefix $(PREFIX)) $(if $(DESTDIR),--destdir $(DESTDIR))

soak: toolchain
	@cargo xtask soak

tidy: toolchain
	@cargo xtask tidy

fmt: toolchain
	@cargo fmt --all

clean:
	@cargo clean

# What xtask itself needs before it can be compiled: cargo and a linker. The rest it does itself.
toolchain:
	@command -v cargo >/dev/null || { \
	    echo "error: no cargo on the PATH; get a toolchain >= 1.90 from https://rustup.rs" >&2; \
	    exit 1; }
	@command -v cc >/dev/null || { \
	    if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	        echo "installing build-essential"; apt-get -q update >/dev/null; \
	        DEBIAN_FRONTEND=noninteractive apt-get -q install -y build-essential >/dev/null; \
	    else \
	        echo "error: no C linker; run: sudo apt-get install -y build-essential" >&2; exit 1; \
	    fi; }

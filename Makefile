# The commands of this project. Plain `make` lists them.

PREFIX ?= /usr/local
DESTDIR ?=
CARGO ?= cargo
CARGO_TARGET_DIR ?= $(CURDIR)/target
export CARGO_TARGET_DIR
# Where rustup puts cargo when it is not in the path yet.
export PATH := $(PATH):$(HOME)/.cargo/bin

PROFILE ?= release
# The folder for the Debian package.
DEB ?= $(CARGO_TARGET_DIR)
binary = $(CARGO_TARGET_DIR)/$(PROFILE)/blockyard
bench = $(binary)-bench
# The figures of `make perf`.
report = $(CARGO_TARGET_DIR)/perf-report.md
share = $(DESTDIR)$(PREFIX)/share
doc = $(share)/doc/blockyard
units = $(DESTDIR)$(PREFIX)/lib/systemd/system

.PHONY: help demo test soak perf bench build lint install uninstall deb clean

help: ## list these commands
	@echo "Blockyard: make COMMAND"
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | \
		while IFS='	' read -r c t; do \
		printf '  %-10s %s\n' "$$c" "$$t"; done

demo: ## boot a User Mode Linux guest on a Blockyard disk, and compare it with host and stock driver
	@scripts/demo

test: ## install what the tests need, and run all of them
	@scripts/test

soak: ## run the tests that take hours: power cuts, long loads, fuzzing (scripts/soak PART runs one)
	@scripts/soak

perf: ## compare rates, latencies and shares with their known figures, on a quiet machine
	@rm -f "$(report)"
	@scripts/setup test
	$(CARGO) build --locked --workspace
	PERF_REPORT="$$(realpath -m "$(report)")" $(CARGO) test --locked -p blockyard-cli \
		-p blockyard-bench --test perf --no-fail-fast -- --test-threads=1 --nocapture; \
		status=$$?; cat "$(report)" && echo "These figures are in $(report)."; exit $$status

bench: ## measure beside peers, into docs/benchmark-tables.md (BEFORE=PROGRAM: an older build)
	@bench/run

build: ## optimised programs: target/release/blockyard, blockyard-bench (4 minutes the first time)
	@scripts/setup build
	$(CARGO) build --release --locked

lint: ## format check, lengths of files and commit subjects, links of pages, clippy
	@scripts/setup lint
	$(CARGO) fmt --all --check
	@scripts/check-lengths
	@scripts/check-links
	@scripts/check-language
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) clippy -p blockyard-cli -p blockyard-bench --test perf --locked -- -D warnings

# Does not depend on `build`: the user runs that, and this may run as root, which has no cargo.
install: ## programs, man pages, documentation, completions, units, guests (PREFIX=, DESTDIR=)
	@test -x "$(binary)" -a -x "$(bench)" || { echo "first: make build" >&2; exit 1; }
	install -Dm755 -t "$(DESTDIR)$(PREFIX)/bin" "$(binary)" "$(bench)"
	install -d "$(share)/man/man1"
	"$(binary)" man "$(share)/man/man1"
	install -d "$(share)/bash-completion/completions" "$(share)/zsh/site-functions" \
		"$(share)/fish/vendor_completions.d"
	"$(binary)" completions bash >"$(share)/bash-completion/completions/blockyard"
	"$(binary)" completions zsh >"$(share)/zsh/site-functions/_blockyard"
	"$(binary)" completions fish >"$(share)/fish/vendor_completions.d/blockyard.fish"
	install -d "$(units)"
	for unit in blockyard.service blockyard@.service blockyard@.socket; do \
		sed 's|@bindir@|$(PREFIX)/bin|' contrib/$$unit >"$(units)/$$unit"; done
	install -Dm644 contrib/sysusers.conf "$(DESTDIR)$(PREFIX)/lib/sysusers.d/blockyard.conf"
	install -Dm644 contrib/tmpfiles.conf "$(DESTDIR)$(PREFIX)/lib/tmpfiles.d/blockyard.conf"
	install -Dm644 -t "$(doc)" ARCHITECTURE.md
	install -Dm644 -t "$(doc)/docs" docs/*.md docs/*.svg docs/*.png
	install -Dm644 -t "$(doc)/docs/design" docs/design/*.md docs/design/*.svg
	install -Dm644 -t "$(doc)/contrib" contrib/blockyard.toml contrib/grafana-dashboard.json
	install -Dm755 -t "$(doc)/contrib/exec" contrib/exec/cowd.py
	install -Dm644 -t "$(doc)/guests" guests/README.md
	install -d "$(share)/blockyard/guests"
	install -m755 guests/setup guests/tool guests/uml guests/qemu guests/guest-init \
		"$(share)/blockyard/guests"
	install -m755 guests/xen guests/xen-block guests/xen-dom0 guests/xen-initramfs \
		"$(share)/blockyard/guests"
	install -m644 guests/lib.sh guests/xen-serve guests/README.md "$(share)/blockyard/guests"
	install -Dm755 contrib/block-blockyard "$(share)/blockyard/contrib/block-blockyard"

uninstall: ## remove what install put there
	rm -f "$(DESTDIR)$(PREFIX)/bin/blockyard" "$(DESTDIR)$(PREFIX)/bin/blockyard-bench" \
		"$(share)/man/man1/blockyard.1" "$(share)"/man/man1/blockyard-*.1 \
		"$(share)/bash-completion/completions/blockyard" "$(share)/zsh/site-functions/_blockyard" \
		"$(share)/fish/vendor_completions.d/blockyard.fish" \
		"$(units)/blockyard.service" "$(units)/blockyard@.service" \
		"$(units)/blockyard@.socket" "$(DESTDIR)$(PREFIX)/lib/sysusers.d/blockyard.conf" \
		"$(DESTDIR)$(PREFIX)/lib/tmpfiles.d/blockyard.conf"
	rm -rf "$(doc)" "$(share)/blockyard"

deb: ## Debian package of what is built, in target/ (DEB=FOLDER: elsewhere)
	@test -x "$(binary)" -a -x "$(bench)" || { echo "first: make build" >&2; exit 1; }
	@scripts/deb "$(DEB)"

clean: ## remove what was built (not the guests' cache: see guests/README.md)
	$(CARGO) clean

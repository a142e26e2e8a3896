# Every target is one line. `make test` is what CI runs; `make demo` is where to start.
.PHONY: help setup check test test-versions demo demo-cluster cluster cluster-down cluster-build e2e e2e-containerd image churn churn-long soak kills bench proof fuzz model model-long deny deny-advisories regen

help: ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' Makefile | expand -t 18

setup: ## install what a machine with Rust and Go still lacks, or say what that is
	@tests/setup.sh

check: setup ## format, lints and fast tests: no cluster, some minutes from cold
	cargo fmt --check && cargo clippy --workspace --all-targets -- -D warnings && cargo test --workspace --lib

test: ## everything, with the minutes of each part
	@tests/run-all.sh

test-versions: setup ## what an older Kubernetes can change, on real ones, each built once from cold: VERSIONS="1.34"
	@tests/versions.sh $(VERSIONS)

demo: ## the daemon on 8 fake GPUs without a cluster: arrivals, a race, kill -9, a switch of mode; Rust and a C compiler are enough
	@cargo build --profile demo --no-default-features -p gpu-bridge -p demo
	@"$${CARGO_TARGET_DIR:-target}/demo/demo"

demo-cluster: setup cluster-build ## the same pods of both kinds on real Kubernetes, and a refusal with its sentence
	@cargo test -p gpu-bridge --test e2e --no-run
	@cargo test -q -p gpu-bridge --test e2e -- --ignored --exact demo::the_main_job --nocapture

cluster: setup ## start a Kubernetes to play with, and say how to use it
	@tests/cluster/up.sh

cluster-down: ## end that Kubernetes
	@tests/cluster/down.sh

cluster-build: ## build Kubernetes 1.37 from its Go modules, once: 10 to 15 minutes from cold
	@tests/cluster/build.sh

e2e: setup cluster-build ## the tests on real Kubernetes alone
	@tests/e2e.sh

e2e-containerd: setup cluster-build ## the same on containerd and runc: needs root and a C compiler, 4 minutes from cold
	@tests/cluster/build-containerd.sh && cargo test -p gpu-bridge --test e2e -- --ignored --nocapture containerd::

image: ## build the image, and let containerd start it as the DaemonSet says: needs root and Debian's buildah; half an hour from cold
	@tests/image.sh

churn: setup cluster-build ## measure one load: SEED=1 PODS=200 LOAD=high DAEMON=bridge, see tests/bench/README.md
	@cargo test -p gpu-bridge --test e2e --no-run
	@cargo test -q -p gpu-bridge --test e2e -- --ignored --exact churn::program::one_run --nocapture

churn-long: setup cluster-build ## measure all loads with three seeds, an hour or so; goes on where it was broken off
	@tests/churn-long.sh

soak: setup ## churn on one daemon for an hour, no cluster: memory, descriptors, answers; SOAK_SECONDS=3600 SEED=1
	@cargo test -p gpu-bridge --test daemon --no-run
	@cargo test -q -p gpu-bridge --test daemon -- --ignored --exact soak::an_hour_of_churn_leaves_memory_and_descriptors_as_they_were_and_no_call_unanswered --nocapture

kills: setup ## kill -9 of the daemon at every step and of the kubelet, no cluster, ten minutes: KILLS=500 SEED=1
	@cargo test -p gpu-bridge --test daemon --no-run
	@cargo test -q -p gpu-bridge --test daemon -- --ignored --exact kills::as_many_kills_as_wanted_lose_no_hold_and_invent_none --nocapture

bench: setup ## time, memory and CPU beside their floors, no cluster: a quiet machine for half an hour; BENCH_ROUNDS=20 BENCH_IDLE_SECONDS=600 BENCH_PARTS="calls idle"
	@tests/bench.sh

proof: setup cluster-build ## the numbers behind the promise on one page: a quarter of an hour
	@tests/proof.sh

fuzz: ## fuzz what is read of others, a minute each: FUZZ_SECONDS=60; needs a nightly compiler and cargo-fuzz, see fuzz/README.md
	@fuzz/run.sh $${FUZZ_SECONDS:-60}

model: setup ## every state of small nodes around the pool, and rules broken on purpose: two minutes; MODEL_SCOPE=faces walks one
	@cargo test -q --profile model -p model --lib --test model -- --include-ignored --nocapture --test-threads=1

model-long: setup ## ten times as far on each node, an hour or so and some GB of memory: MODEL_STEPS=8500000, or whole
	@MODEL_STEPS=$${MODEL_STEPS:-8500000} cargo test -q --profile model -p model --test model -- --ignored --nocapture --test-threads=1 every_state

deny: ## licences, versions and sources of all dependencies, without a network once `cargo fetch` was run; needs cargo-deny
	cargo deny --offline check licenses bans sources

deny-advisories: ## what is known against them: asks for the newest list of advisories
	cargo deny check advisories

regen: ## rewrite the Rust of the .proto files and every golden file; read the diff before you commit it
	UPDATE_PROTO=1 UPDATE_EXPECT=1 cargo test --workspace --lib --test bootstrap --test admin

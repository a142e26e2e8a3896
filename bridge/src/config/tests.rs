//! Good files, and every way in which one can be wrong.

use bridge_core::{
    DeviceRule, DeviceSpecs, Faces, Handout, IdStrategy, Limits, ListStrategy, Matcher, Mode,
    Prefer, Weights, Xid, XidAction, XidRules,
};
use expect_test::{Expect, expect};
use proptest::prelude::*;

use super::*;

const HEAD: &str = "apiVersion: gpu-bridge.dev/v1alpha1\n";

fn file(text: &str) -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.yaml");
    std::fs::write(&path, text).unwrap();
    (folder, path)
}

fn good(text: &str) -> Config {
    load(&file(&format!("{HEAD}{text}")).1).unwrap().base
}

fn check(text: &str, expected: Expect) {
    let (folder, path) = file(text);
    let error = load(&path).unwrap_err();
    assert_eq!(report(&path).unwrap_err().to_string(), error.to_string());
    let mut said = error.to_string();
    let mut cause = std::error::Error::source(&error);
    while let Some(error) = cause {
        said = format!("{said}: {error}");
        cause = error.source();
    }
    let folder = folder.path().to_str().unwrap();
    expected.assert_eq(&said.replace(&format!("{folder}/"), ""));
}

#[test]
fn a_file_that_chooses_nothing_means_the_defaults() {
    assert_eq!(good(""), Config::default());
    assert_eq!(good("limits:\noffers:\n  weights:\n"), Config::default());
    assert_eq!(Config::default().settings.mode, Mode::Both);
}

/// The keys with a value of their own in this part of a JSON schema.
fn keys_in(schema: &serde_json::Value, above: &str) -> Vec<String> {
    let Some(properties) = schema["properties"].as_object() else {
        return vec![above.to_owned()];
    };
    let dot = if above.is_empty() { "" } else { "." };
    let inner = properties
        .iter()
        .flat_map(|(name, part)| keys_in(part, &format!("{above}{dot}{name}")));
    inner.collect()
}

#[test]
fn the_charts_schema_takes_every_key_and_no_other() {
    let schema = include_str!("../../../manifests/chart/gpu-bridge/values.schema.json");
    let schema: serde_json::Value = serde_json::from_str(schema).unwrap();
    let mut taken = keys_in(&schema["properties"]["config"], "");
    // The chart writes it by itself.
    taken.push("apiVersion".to_owned());
    taken.sort();
    let is_single = |key: &&keys::Key| !matches!(key.shape, keys::Shape::Group);
    let keys = keys::KEYS.iter().filter(is_single);
    let mut keys: Vec<&str> = keys.map(|key| key.name).collect();
    keys.sort_unstable();
    assert_eq!(taken, keys);
}

#[test]
fn every_key_is_taken() {
    let config = good(
        "mode: dra\n\
         limits: {legacy: 7, dra: 128}\n\
         devices:\n- {index: 3, faces: [dra]}\n- {product: '*A100*', faces: []}\n\
         offers:\n  minLegacy: 2\n  settle: 500ms\n  dwell: 1s\n  quiet: 50ms\n  notice: bind\n  demand: watch\n  weights:\n    legacy: 3\n    dra: 0\n\
         allocation: {prefer: tail}\n\
         ignoreProcesses:\n- dcgm-exporter\n- \"x y\"\n\
         health:\n  xids: {ignore: [62, 48], fault: [94], others: ignore}\n\
         devicePlugin:\n  deviceListStrategy: [envvar, cdi-cri]\n  deviceIDStrategy: index\n  passDeviceSpecs: true\n  cdiAnnotationPrefix: nvidia.cdi.k8s.io/\n",
    );
    assert_eq!(config.settings.mode, Mode::Dra);
    let limits = Limits {
        legacy: Some(7),
        dra: Some(128),
    };
    assert_eq!(config.settings.limits, limits);
    assert_eq!(config.settings.weights, Weights { legacy: 3, dra: 0 });
    assert_eq!(config.settings.min_legacy, 2);
    let rules = [
        DeviceRule {
            matcher: Matcher::Index(3),
            faces: Faces {
                legacy: false,
                dra: true,
            },
        },
        DeviceRule {
            matcher: Matcher::Product("*A100*".to_owned()),
            faces: Faces::NONE,
        },
    ];
    assert_eq!(config.settings.devices, rules);
    let pace = config.settings.pace;
    assert_eq!(
        [pace.settle, pace.dwell, pace.quiet].map(|pause| pause.as_millis()),
        [500, 1_000, 50]
    );
    assert_eq!(
        (config.notice, config.demand),
        (Notice::Bind, Demand::Watch)
    );
    assert_eq!(config.settings.prefer, Prefer::Tail);
    assert_eq!(config.ignore_processes, ["dcgm-exporter", "x y"]);
    let xids = XidRules {
        ignore: [48, 62].map(Xid::new).into(),
        fault: [Xid::new(94)].into(),
        others: XidAction::Ignore,
    };
    assert_eq!(config.settings.xids, xids);
    let handout = Handout {
        strategies: [ListStrategy::Envvar, ListStrategy::CdiCri].into(),
        ids: IdStrategy::Index,
        device_specs: DeviceSpecs::Passed,
        cdi_annotation_prefix: "nvidia.cdi.k8s.io/".to_owned(),
    };
    assert_eq!(config.handout, handout);
}

#[test]
fn every_device_list_strategy_is_taken_as_a_word_or_in_a_list() {
    for strategy in ListStrategy::ALL {
        let word = strategy.as_str();
        for value in [
            word.to_owned(),
            format!("[{word}]"),
            format!("[{word}, {word}]"),
        ] {
            let config = good(&format!("devicePlugin:\n  deviceListStrategy: {value}\n"));
            assert_eq!(config.handout.strategies, [strategy].into());
        }
    }
}

#[test]
fn a_wrong_way_to_hand_devices_out_is_told_with_those_there_are() {
    check(
        &format!(
            "{HEAD}devicePlugin:\n  deviceListStrategy: [envvar, cdi]\n  deviceIDStrategy: uid\n  passDeviceSpecs: yes please\n  cdiAnnotationPrefix: cdi.k8s.io\n"
        ),
        expect![[r#"
            the configuration config.yaml has 4 mistakes and is not used:
              config.yaml:3: devicePlugin.deviceListStrategy: a list: allowed: cdi-cri, cdi-annotations, envvar, volume-mounts
              config.yaml:4: devicePlugin.deviceIDStrategy: "uid": allowed: uuid, index; did you mean uuid?
              config.yaml:5: devicePlugin.passDeviceSpecs: "yes please": allowed: true, false
              config.yaml:6: devicePlugin.cdiAnnotationPrefix: "cdi.k8s.io": allowed: a domain and a slash, such as cdi.k8s.io/"#]],
    );
    check(
        &format!("{HEAD}devicePlugin:\n  deviceListStrategy: []\n  deviceIdStrategy: uuid\n"),
        expect![[r#"
            the configuration config.yaml has 2 mistakes and is not used:
              config.yaml:3: devicePlugin.deviceListStrategy: a list: at least one is needed; leave the key out for cdi-cri
              config.yaml:4: devicePlugin.deviceIdStrategy: "uuid": there is no such key; did you mean devicePlugin.deviceIDStrategy?"#]],
    );
}

#[test]
fn every_mode_is_taken() {
    for mode in Mode::ALL {
        let text = format!("mode: {}", mode.as_str());
        assert_eq!(good(&text).settings.mode, mode);
    }
}

#[test]
fn a_process_is_recognised_by_what_the_kernel_keeps_of_its_name() {
    let config = good("ignoreProcesses: [nvidia-persistenced, dcgm]");
    assert!(config.ignores("nvidia-persiste"));
    assert!(config.ignores("dcgm"));
    assert!(!config.ignores("dcg"));
    assert!(!config.ignores("dcgm2"));
    assert!(!config.ignores(""));
    assert!(!config.ignores("nvidia-persist"));
}

#[test]
fn all_mistakes_are_told_at_once_with_their_places() {
    check(
        "\
apiVersion: gpu-bridge.dev/v1
mode: Both
limits:
  legcy: 4
  dra: -1
offers:
  weights: {legacy: 1.5, dra: \"2\"}
  settle: fast
ignoreProcesses:
  - /usr/bin/dcgm
  - 7
  - ''
legacy: 3
nonsense: [1, 2]
",
        expect![[r#"
            the configuration config.yaml has 12 mistakes and is not used:
              config.yaml:1: apiVersion: "gpu-bridge.dev/v1": this version reads gpu-bridge.dev/v1alpha1 only
              config.yaml:2: mode: "Both": is no mode; allowed: legacy, both, dra, drained; did you mean both?
              config.yaml:4: limits.legcy: 4: there is no such key; did you mean limits.legacy?
              config.yaml:5: limits.dra: -1: allowed: a whole number from 0 to 128
              config.yaml:7: offers.weights.legacy: 1.5: allowed: a whole number from 0 to 1000
              config.yaml:7: offers.weights.dra: "2": allowed: a whole number from 0 to 1000, without quotes
              config.yaml:8: offers.settle: "fast": allowed: a time from 50ms to 30s, written as 300ms or 1s
              config.yaml:10: ignoreProcesses[0]: "/usr/bin/dcgm": a process name has no path; give what /proc/<pid>/comm shows
              config.yaml:11: ignoreProcesses[1]: 7: a process name is text; put it in quotes
              config.yaml:12: ignoreProcesses[2]: "": a process name is not empty
              config.yaml:13: legacy: 3: there is no such key; did you mean limits.legacy?
              config.yaml:14: nonsense: a list: there is no such key; known keys: apiVersion, mode, limits.legacy, limits.dra, offers.minLegacy, offers.weights.legacy, offers.weights.dra, offers.settle, offers.dwell, offers.quiet, offers.notice, offers.demand, allocation.prefer, ignoreProcesses, devicePlugin.deviceListStrategy, devicePlugin.deviceIDStrategy, devicePlugin.passDeviceSpecs, devicePlugin.cdiAnnotationPrefix, health.xids.ignore, health.xids.fault, health.xids.others, devices, profiles"#]],
    );
}

#[test]
fn a_wrong_way_to_notice_or_to_move_is_told_with_those_there_are() {
    check(
        &format!("{HEAD}offers:\n  notice: binds\n  demand: off\n"),
        expect![[r#"
            the configuration config.yaml has 2 mistakes and is not used:
              config.yaml:3: offers.notice: "binds": allowed: allocation, bind; did you mean bind?
              config.yaml:4: offers.demand: "off": allowed: turns, watch"#]],
    );
}

#[test]
fn a_wrong_way_to_prefer_gpus_is_told_with_those_there_are_and_a_profile_has_its_own() {
    check(
        &format!(
            "{HEAD}allocation:\n  prefer: packed\n  policy: distributed\nprofiles:\n  odd:\n    allocation: {{prefer: tails}}\n"
        ),
        expect![[r#"
            the configuration config.yaml has 3 mistakes and is not used:
              config.yaml:3: allocation.prefer: "packed": allowed: wiring, tail
              config.yaml:4: allocation.policy: "distributed": there is no such key; known keys: apiVersion, mode, limits.legacy, limits.dra, offers.minLegacy, offers.weights.legacy, offers.weights.dra, offers.settle, offers.dwell, offers.quiet, offers.notice, offers.demand, allocation.prefer, ignoreProcesses, devicePlugin.deviceListStrategy, devicePlugin.deviceIDStrategy, devicePlugin.passDeviceSpecs, devicePlugin.cdiAnnotationPrefix, health.xids.ignore, health.xids.fault, health.xids.others, devices, profiles
              config.yaml:7: profiles.odd.allocation.prefer: "tails": allowed: wiring, tail; did you mean tail?"#]],
    );
    check(
        &format!("{HEAD}allocation: tail\n"),
        expect![[r#"
            the configuration config.yaml has a mistake and is not used:
              config.yaml:2: allocation: "tail": keys and values are expected here"#]],
    );
    let (_folder, path) = file(&format!(
        "{HEAD}profiles: {{odd: {{allocation: {{prefer: tail}}}}, empty: {{allocation: }}}}\n"
    ));
    let document = load(&path).unwrap();
    let prefer = |profile| document.choose(profile).unwrap().settings.prefer;
    assert_eq!(prefer(None), Prefer::Wiring);
    assert_eq!(prefer(Some("odd")), Prefer::Tail);
    assert_eq!(prefer(Some("empty")), Prefer::Wiring);
}

#[test]
fn a_time_that_no_move_can_keep_is_told_with_what_is_allowed() {
    for value in ["10ms", "31s", "300", "-1s", "1.5s", "[]"] {
        let (_folder, path) = file(&format!("{HEAD}offers:\n  quiet: {value}\n"));
        let said = load(&path).unwrap_err().to_string();
        assert!(
            said.contains("offers.quiet") && said.contains("from 50ms to 30s"),
            "{said}"
        );
    }
}

#[test]
fn a_file_without_its_version_is_not_guessed_at() {
    for text in ["", "# nothing\n"] {
        load(&file(text).1).unwrap_err();
    }
    check(
        "mode: both\n",
        expect![[r#"
        the configuration config.yaml has a mistake and is not used:
          config.yaml: apiVersion: is missing; write apiVersion: gpu-bridge.dev/v1alpha1"#]],
    );
}

#[test]
fn values_of_a_wrong_kind_are_named() {
    check(
        &format!(
            "{HEAD}mode:\nlimits: 8\noffers: [weights]\nignoreProcesses: dcgm\n8: x\n? [a]\n: b\n"
        ),
        expect![[r#"
            the configuration config.yaml has 6 mistakes and is not used:
              config.yaml: 8: "x": there is no such key; known keys: apiVersion, mode, limits.legacy, limits.dra, offers.minLegacy, offers.weights.legacy, offers.weights.dra, offers.settle, offers.dwell, offers.quiet, offers.notice, offers.demand, allocation.prefer, ignoreProcesses, devicePlugin.deviceListStrategy, devicePlugin.deviceIDStrategy, devicePlugin.passDeviceSpecs, devicePlugin.cdiAnnotationPrefix, health.xids.ignore, health.xids.fault, health.xids.others, devices, profiles
              config.yaml: a list: "b": there is no such key; known keys: apiVersion, mode, limits.legacy, limits.dra, offers.minLegacy, offers.weights.legacy, offers.weights.dra, offers.settle, offers.dwell, offers.quiet, offers.notice, offers.demand, allocation.prefer, ignoreProcesses, devicePlugin.deviceListStrategy, devicePlugin.deviceIDStrategy, devicePlugin.passDeviceSpecs, devicePlugin.cdiAnnotationPrefix, health.xids.ignore, health.xids.fault, health.xids.others, devices, profiles
              config.yaml:2: mode: nothing: is no mode; allowed: legacy, both, dra, drained
              config.yaml:3: limits: 8: keys and values are expected here
              config.yaml:4: offers: a list: keys and values are expected here
              config.yaml:5: ignoreProcesses: "dcgm": a list of process names is expected, such as [dcgm-exporter]"#]],
    );
    check(
        "- mode: both\n",
        expect![[r#"
        the configuration config.yaml has 2 mistakes and is not used:
          config.yaml: the file: a list: keys and values are expected here
          config.yaml: apiVersion: is missing; write apiVersion: gpu-bridge.dev/v1alpha1"#]],
    );
    check(
        &format!(
            "{HEAD}limits:\n  legacy: 129\n  dra: 99999999999999999999\nmode: {}\n",
            "x".repeat(99)
        ),
        expect![
            "the configuration config.yaml is no valid YAML: limits.dra: invalid type: integer `99999999999999999999` as u128, expected any YAML value at line 4 column 8"
        ],
    );
}

#[test]
fn weights_that_offer_nothing_are_a_mistake() {
    check(
        &format!("{HEAD}offers:\n  weights:\n    legacy: 0\n    dra: 0\n"),
        expect![[r#"
            the configuration config.yaml has a mistake and is not used:
              config.yaml:3: offers.weights: legacy 0, dra 0: nothing would be offered anywhere; use mode: drained for that"#]],
    );
}

#[test]
fn too_many_process_names_are_a_mistake() {
    let names = "- a\n".repeat(65);
    check(
        &format!("{HEAD}ignoreProcesses:\n{names}"),
        expect![[r#"
            the configuration config.yaml has a mistake and is not used:
              config.yaml:2: ignoreProcesses: a list: 65 names are more than the 64 allowed"#]],
    );
}

#[test]
fn a_file_that_is_no_yaml_says_where() {
    check(
        &format!("{HEAD}mode: [both\n"),
        expect![
            "the configuration config.yaml is no valid YAML: did not find expected ',' or ']' at line 3 column 1, while parsing a flow sequence at line 2 column 7"
        ],
    );
    check(
        &format!("{HEAD}mode: both\nmode: dra\n"),
        expect![[
            r#"the configuration config.yaml is no valid YAML: duplicate entry with key "mode""#
        ]],
    );
}

#[test]
fn a_file_that_can_not_be_read_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("absent.yaml");
    let error = load(&path).unwrap_err();
    assert!(matches!(error, Error::Unreadable { .. }), "{error:?}");
    assert!(
        error.to_string().contains(path.to_str().unwrap()),
        "{error}"
    );
    std::fs::File::create(&path)
        .unwrap()
        .set_len(1024 * 1024 + 1)
        .unwrap();
    assert!(matches!(load(&path), Err(Error::Unreadable { .. })));
}

#[test]
fn a_report_says_what_a_file_means() {
    let text = "mode: legacy\nlimits: {legacy: 5}\nignoreProcesses: [a, b]\n";
    let (folder, path) = file(&format!("{HEAD}{text}"));
    let said = report(&path).unwrap();
    expect![[r#"
        config.yaml is good. It means:
          mode             legacy
          limits           legacy 5, dra no limit
          offers.weights   legacy 1, dra 1
          offers           settle 300 ms, dwell 500 ms, quiet 300 ms, minLegacy 0
          offers.notice    allocation
          offers.demand    turns
          allocation       prefer wiring
          ignoreProcesses  a, b
          devicePlugin     cdi-cri by uuid
          health.xids      ignore 13 31 43 45 63 68 94 109, others fault
          devices          none
    "#]]
    .assert_eq(&said.replace(&format!("{}/", folder.path().display()), ""));
}

#[test]
fn a_profile_overrides_what_holds_everywhere_key_by_key() {
    let (_folder, path) = file(&format!(
        "{HEAD}mode: legacy\nlimits: {{dra: 2}}\nignoreProcesses: [a]\n\
         profiles:\n  claims: {{mode: both, limits: {{legacy: 1}}}}\n  empty:\n  agents: {{ignoreProcesses: [b, c]}}\n",
    ));
    let document = load(&path).unwrap();
    let limits = |legacy, dra| Limits { legacy, dra };
    assert_eq!(document.base.settings.limits, limits(None, Some(2)));
    let claims = document.choose(Some("claims")).unwrap();
    assert_eq!(claims.settings.mode, Mode::Both);
    assert_eq!(claims.settings.limits, limits(Some(1), Some(2)));
    assert_eq!(claims.ignore_processes, ["a"]);
    assert_eq!(document.choose(Some("empty")), Ok(&document.base));
    let agents = document.choose(Some("agents")).unwrap();
    assert_eq!(agents.ignore_processes, ["b", "c"]);
    assert_eq!(agents.settings, document.base.settings);
    assert_eq!(document.choose(None), Ok(&document.base));
    document.choose(Some("other")).unwrap_err();
    let said = report(&path).unwrap();
    let (_, profiles) = said.split_once("  with ").unwrap();
    let lines: Vec<&str> = profiles.lines().map(str::trim).collect();
    assert_eq!(
        lines,
        [
            "gpu-bridge.dev/profile=agents:",
            "ignoreProcesses  b, c",
            "with gpu-bridge.dev/profile=claims:",
            "mode             both",
            "limits           legacy 1, dra 2",
            "with gpu-bridge.dev/profile=empty:",
        ]
    );
}

#[test]
fn what_is_wrong_in_a_profile_is_told_with_its_place() {
    check(
        &format!(
            "{HEAD}offers: {{weights: {{dra: 0}}}}\nprofiles:\n  a:\n    mode: no\n    profiles: {{}}\n    apiVersion: x\n  \
             b:\n    limits:\n      legcy: 3\n  -c: {{mode: dra}}\n  7: {{}}\n  \
             d: {{offers: {{weights: {{legacy: 0}}}}}}\n  e: {{limits: {{legacy: 1}}, offers: {{minLegacy: 2}}}}\n"
        ),
        expect![[r#"
            the configuration config.yaml has 8 mistakes and is not used:
              config.yaml: profiles[7]: keys and values: a profile is named as a label's value can be: up to 63 letters, digits, '-', '_' and '.', the first and the last of them a letter or a digit; put a number in quotes
              config.yaml:5: profiles.a.mode: "no": is no mode; allowed: legacy, both, dra, drained
              config.yaml:6: profiles.a.profiles: keys and values: holds for the whole file, and stands at its top
              config.yaml:7: profiles.a.apiVersion: "x": holds for the whole file, and stands at its top
              config.yaml:10: profiles.b.limits.legcy: 3: there is no such key; did you mean limits.legacy?
              config.yaml:11: profiles.-c: keys and values: a profile is named as a label's value can be: up to 63 letters, digits, '-', '_' and '.', the first and the last of them a letter or a digit; put a number in quotes
              config.yaml:13: profiles.d.offers.weights: legacy 0, dra 0: nothing would be offered anywhere; use mode: drained for that
              config.yaml:14: profiles.e.offers.minLegacy: 2: is more than limits.legacy lets counted pods have"#]],
    );
    check(
        &format!("{HEAD}profiles: [a]\n"),
        expect![[r#"
        the configuration config.yaml has a mistake and is not used:
          config.yaml:2: profiles: a list: names of profiles are expected here, each with keys below it"#]],
    );
}

#[test]
fn what_is_wrong_in_a_rule_for_gpus_is_told_with_its_place() {
    check(
        &format!(
            "{HEAD}devices:\n- {{uuid: GPU-1}}\n- {{index: 1, product: x, faces: []}}\n- {{indx: 1, faces: [legacy]}}\n\
             - {{index: -1, faces: [legacy]}}\n- {{pciBusId: here, faces: [both]}}\n- {{mig: 1g.10gb, faces: [dra]}}\n\
             - {{uuid: MIG-1, faces: [dra, dra]}}\n- all\n"
        ),
        expect![[r#"
            the configuration config.yaml has 12 mistakes and is not used:
              config.yaml:3: devices[0]: keys and values: has no faces; write [legacy] for counted pods, [dra] for claims, [] for nobody
              config.yaml:4: devices[1]: keys and values: has 2 of uuid, index, pciBusId and product, and needs exactly one
              config.yaml:5: devices[2].indx: 1: there is no such key in a rule; did you mean index?
              config.yaml:5: devices[2]: keys and values: has 0 of uuid, index, pciBusId and product, and needs exactly one
              config.yaml:6: devices[3].index: -1: allowed: a whole number from 0 to 1048575
              config.yaml:7: devices[4].pciBusId: "here": a place on the PCI bus is written as 0000:65:00.0
              config.yaml:7: devices[4].faces: a list: "both" is no face; allowed: a list of legacy and dra, each once at most; [] excludes the GPU
              config.yaml:8: devices[5].mig: "1g.10gb": MIG instances are not served yet, so there is nothing to choose among them
              config.yaml:8: devices[5]: keys and values: has 0 of uuid, index, pciBusId and product, and needs exactly one
              config.yaml:9: devices[6].uuid: "MIG-1": MIG instances are not served yet, so there is nothing to choose among them
              config.yaml:9: devices[6].faces: a list: allowed: a list of legacy and dra, each once at most; [] excludes the GPU
              config.yaml:10: devices[7]: "all": a rule has a key that says which GPU, and faces, as in {index: 0, faces: [dra]}"#]],
    );
    check(
        &format!("{HEAD}devices: none\n"),
        expect![[r#"
        the configuration config.yaml has a mistake and is not used:
          config.yaml:2: devices: "none": a list of rules is expected, such as [{index: 0, faces: [dra]}]"#]],
    );
}

#[test]
fn a_file_of_nvidias_plugin_is_read_and_what_is_not_done_is_said_key_by_key() {
    let (folder, path) = file(
        "version: v1\n\
         flags:\n  migStrategy: mixed\n  failOnInitError: true\n  nvidiaDriverRoot: /run/nvidia/driver\n  \
         gdsEnabled: false\n  plugin:\n    passDeviceSpecs: true\n    deviceListStrategy: [envvar, cdi-cri]\n    \
         deviceIDStrategy: uuid\n  gfd: {oneshot: true}\n\
         resources:\n  gpus: [{pattern: '*', name: nvidia.com/a100}]\n\
         sharing:\n  timeSlicing:\n    renameByDefault: false\n    resources: [{name: nvidia.com/gpu, replicas: 4}]\n\
         typo: 1\n",
    );
    let said = report(&path).unwrap();
    expect![[r#"
        config.yaml is good. It means:
          mode             legacy
          limits           legacy no limit, dra no limit
          offers.weights   legacy 1, dra 1
          offers           settle 300 ms, dwell 500 ms, quiet 300 ms, minLegacy 0
          offers.notice    allocation
          offers.demand    turns
          allocation       prefer wiring
          ignoreProcesses  none
          devicePlugin     cdi-cri, envvar by uuid, device nodes passed
          health.xids      ignore 13 31 43 45 63 68 94 109, others fault
          devices          none
        Not done:
          this is a file of NVIDIA's device plugin, which knows counted pods alone, so the mode is legacy
          flags.migStrategy: "mixed": MIG instances are not served yet; a GPU is served as a whole
          flags.nvidiaDriverRoot: "/run/nvidia/driver": give --driver-root to `gpu-bridge run`
          flags.gfd.oneshot: true: the daemon does not label nodes
          resources.gpus: a list: the resource is nvidia.com/gpu; NVIDIA's plugin does not rename it either
          sharing.timeSlicing.resources: a list: sharing a GPU between pods is not served yet: a pod gets whole ones
          typo: 1: is no key of NVIDIA's file, and means nothing
    "#]].assert_eq(&said.replace(&format!("{}/", folder.path().display()), ""));
    let plain = "version: v1\nflags: {migStrategy: none, plugin: {deviceListStrategy: cdi-cri}}\n";
    let document = load(&file(plain).1).unwrap();
    assert_eq!(document.base.settings.mode, Mode::Legacy);
    assert_eq!(document.remarks.len(), 1, "{:?}", document.remarks);
    check(
        "version: v2\nflags: {}\n",
        expect![[r#"
        the configuration config.yaml has a mistake and is not used:
          config.yaml:1: version: "v2": of NVIDIA's files this version reads v1 only"#]],
    );
}

/// Each key with values that it takes and values that it does not.
const SAMPLES: [(&str, &[&str], &[&str]); 22] = [
    ("apiVersion", &["gpu-bridge.dev/v1alpha1"], &["v1", "1"]),
    ("mode", &["legacy", "both", "dra", "drained"], &["all", "1"]),
    ("limits.legacy", &["0", "128"], &["129", "-1", "1.5", "a"]),
    ("limits.dra", &["0", "128"], &["129", "'2'"]),
    ("offers.minLegacy", &["0", "2"], &["-1", "x"]),
    ("offers.weights.legacy", &["0", "1000"], &["1001"]),
    ("offers.weights.dra", &["1", "1000"], &["-1"]),
    ("offers.settle", &["300ms", "1s"], &["1", "1m", "fast"]),
    ("offers.dwell", &["300ms", "30s"], &["1.5s"]),
    ("offers.quiet", &["50ms"], &["ms"]),
    ("offers.notice", &["allocation", "bind"], &["never"]),
    ("offers.demand", &["turns", "watch"], &["yes"]),
    (
        "allocation.prefer",
        &["wiring", "tail"],
        &["distributed", "packed", "[tail]", "1"],
    ),
    (
        "ignoreProcesses",
        &["[]", "[a, b]"],
        &["a", "[a/b]", "[1]", "['']"],
    ),
    (
        "health.xids.ignore",
        &["[]", "[48, 62]"],
        &["48", "[0]", "[a]", "[-1]", "[10000]"],
    ),
    ("health.xids.fault", &["[94]"], &["{}", "['94']"]),
    ("health.xids.others", &["ignore", "fault"], &["off"]),
    (
        "devicePlugin.deviceListStrategy",
        &["envvar", "[cdi-cri, volume-mounts]"],
        &["cdi", "[]", "[x]", "true"],
    ),
    (
        "devicePlugin.deviceIDStrategy",
        &["uuid", "index"],
        &["uid"],
    ),
    (
        "devicePlugin.passDeviceSpecs",
        &["true", "false"],
        &["yes please", "1"],
    ),
    (
        "devicePlugin.cdiAnnotationPrefix",
        &["nvidia.cdi.k8s.io/"],
        &["cdi.k8s.io", "/"],
    ),
    (
        "devices",
        &[
            "[]",
            "[{index: 0, faces: []}, {uuid: GPU-1, faces: [dra]}]",
            "[{pciBusId: '0000:65:00.0', faces: [legacy, dra]}, {product: '*', faces: [legacy]}]",
        ],
        &[
            "{}",
            "[{index: 0}]",
            "[{faces: []}]",
            "[{index: 0, uuid: GPU-1, faces: []}]",
            "[{index: 0, faces: [all]}]",
            "[{pciBusId: x, faces: []}]",
            "[{uuid: x, faces: []}]",
            "[{mig: 1g.10gb, faces: []}]",
            "[{index: 0, faces: [dra, dra]}]",
        ],
    ),
];

/// A file with one key, or with that key in a profile.
fn with_key(key: &str, value: &str, in_profile: bool) -> String {
    let mut text = if key == "apiVersion" {
        String::new()
    } else {
        HEAD.to_owned()
    };
    let parents = in_profile.then_some(["profiles", "p"]);
    let parts = parents.into_iter().flatten().chain(key.split('.'));
    for (depth, part) in parts.enumerate() {
        text.push_str(&format!("{}{part}:\n", "  ".repeat(depth)));
    }
    format!("{} {value}\n", text.trim_end())
}

#[test]
fn the_json_schema_allows_what_the_reader_takes_and_refuses_what_it_refuses() {
    let schema = json_schema();
    let validator = jsonschema::validator_for(&schema).unwrap();
    let sampled: Vec<&str> = SAMPLES.iter().map(|(key, _, _)| *key).collect();
    for key in keys::KEYS {
        let is_single = !matches!(key.shape, keys::Shape::Group | keys::Shape::Profiles);
        assert_eq!(sampled.contains(&key.name), is_single, "{}", key.name);
    }
    let mut tried = 0;
    for (key, good, wrong) in SAMPLES {
        let samples = good.iter().map(|it| (it, true));
        for (value, is_good) in samples.chain(wrong.iter().map(|it| (it, false))) {
            for in_profile in [false, true] {
                if in_profile && key == "apiVersion" {
                    continue;
                }
                let text = with_key(key, value, in_profile);
                let json: serde_json::Value = serde_yaml::from_str(&text).unwrap();
                let taken = schema::parse(&text).unwrap();
                assert_eq!(taken.is_ok(), is_good, "the reader and {text}: {taken:?}");
                assert_eq!(validator.is_valid(&json), is_good, "the schema and {text}");
                tried += 1;
            }
        }
    }
    assert!(tried > 80, "{tried}");
    for text in ["", "profiles: {a: {mode: dra}}\n", "limits:\nprofiles:\n"] {
        let json: serde_json::Value = serde_yaml::from_str(&format!("{HEAD}{text}")).unwrap();
        assert!(validator.is_valid(&json), "{text}");
    }
    for text in [
        "x: 1\n",
        "limits: {x: 1}\n",
        "profiles: {a: {profiles: {}}}\n",
        "profiles: {-a: {}}\n",
    ] {
        let json: serde_json::Value = serde_yaml::from_str(&format!("{HEAD}{text}")).unwrap();
        assert!(!validator.is_valid(&json), "{text}");
        schema::parse(&format!("{HEAD}{text}"))
            .unwrap()
            .unwrap_err();
    }
}

#[test]
fn an_error_is_in_one_list_and_a_profile_has_lists_of_its_own() {
    check(
        "health: {xids: {ignore: [48, 79, 94], fault: [94, 48]}}\n\
         profiles: {old: {health: {xids: {ignore: [79], fault: [79]}}}}\n",
        expect![[r#"
            the configuration config.yaml has 3 mistakes and is not used:
              config.yaml: apiVersion: is missing; write apiVersion: gpu-bridge.dev/v1alpha1
              config.yaml:1: health.xids.ignore: 48, 94: is in health.xids.fault too; leave it in one of the two
              config.yaml:2: profiles.old.health.xids.ignore: 79: is in health.xids.fault too; leave it in one of the two"#]],
    );
    let (_folder, path) = file(&format!(
        "{HEAD}health: {{xids: {{fault: [94]}}}}\nprofiles: {{off: {{health: {{xids: {{fault: [], others: ignore}}}}}}}}\n"
    ));
    let document = load(&path).unwrap();
    let contained = Xid::new(94);
    assert_eq!(
        document.base.settings.xids.action(contained),
        XidAction::Fault
    );
    let off = &document.profiles["off"].settings.xids;
    for xid in [48, 79, 94, 119] {
        assert_eq!(off.action(Xid::new(xid)), XidAction::Ignore, "{xid}");
    }
}

#[test]
fn the_json_schema_that_is_shipped_is_the_one_of_the_program() {
    let path =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../manifests/config.schema.json");
    expect_test::expect_file![path].assert_eq(&format!("{:#}\n", json_schema()));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_text_makes_the_reader_fail_in_another_way_than_with_mistakes(
        lines in proptest::collection::vec(
            "( |  |- |# )?(mode|limits|legacy|offers|weights|ignoreProcesses|\\PC{0,4})?(:|: \\{|: \\[)?( \\PC{0,4})?",
            0..8,
        ),
    ) {
        if let Ok(Ok(config)) = schema::parse(&lines.join("\n")) {
            panic!("{config:?} was read from a text without apiVersion");
        }
    }
}

#[test]
fn a_file_full_of_brackets_is_not_read_any_further() {
    let text = format!("{HEAD}# one [\nignoreProcesses: {}\n", "[".repeat(100_000));
    check(
        &text,
        expect![[r#"
        the configuration config.yaml has a mistake and is not used:
          config.yaml:3: the file: has more than 200 opening brackets ([ or {), comments included, and is not read any further; the configuration needs hardly any, so look what has got into the file"#]],
    );
    let config = good(&format!("# {}\nignoreProcesses: [a]\n", "[{".repeat(99)));
    assert_eq!(config.ignore_processes, ["a"]);
}

#[test]
fn of_a_file_that_is_wrong_all_over_the_first_mistakes_are_told() {
    let lines = (0..20_000).map(|number| format!("{}{number}: 1\n", "long".repeat(10)));
    let (_folder, path) = file(&lines.collect::<String>());
    let error = load(&path).unwrap_err().to_string();
    assert!(error.contains("config.yaml:1: longlong"), "{error}");
    assert!(
        error.ends_with("has 19900 mistakes more, which are told once these are gone"),
        "{error}"
    );
    assert!(error.len() < 100_000, "{} bytes", error.len());
}

#[test]
fn every_key_is_in_the_guide() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../migration-guide/configuration.md");
    let guide = std::fs::read_to_string(path).unwrap();
    let is_group = |key: &&keys::Key| matches!(key.shape, keys::Shape::Group);
    let keys = keys::KEYS
        .iter()
        .filter(|key| !is_group(key))
        .map(|key| key.name);
    for key in keys.chain(keys::RULE_KEYS.iter().map(|(key, _)| *key)) {
        let row = format!("\n| `{key}` |");
        assert!(guide.contains(&row), "{key} has no row in configuration.md");
    }
    let rows = guide.matches("\n| `").count();
    let named = keys::KEYS.iter().filter(|key| !is_group(key)).count() + keys::RULE_KEYS.len();
    assert_eq!(rows, named, "a row of the guide is about no key");
}

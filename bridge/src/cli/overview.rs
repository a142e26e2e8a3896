//! The status page as a person reads it.

use super::paint::{Colours, Paint};
use super::table::{LINE, Table, cut, wrap};
use crate::admin::{ConditionPage, HoldPage, HolderPage, StatusPage, UnitPage};

/// The least that a UUID is cut to: `GPU-` and eight digits, as long as that tells the units apart.
const SHORT_UUID: usize = 12;
/// Columns of the narrow table that may be cut, and down to which width: holder, product.
const MAY_BE_CUT: [(usize, usize); 2] = [(5, 20), (2, 8)];
/// The column of the state.
const STATE: usize = 4;
/// The column of the health.
const HEALTH: usize = 3;

/// How the page is to look.
#[derive(Debug, Clone)]
pub(super) struct Look {
    /// How much of everything.
    pub(super) shape: Shape,
    /// Whether there are colours.
    pub(super) colours: Colours,
    /// The time now, RFC 3339 in UTC: what is of today is told by its time alone.
    pub(super) now: String,
}

/// How much is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// What fits on a line of [`LINE`] characters.
    Narrow,
    /// Everything.
    Wide,
}

/// The whole page.
pub(super) fn describe(page: &StatusPage, look: &Look) -> String {
    let mut text = format!(
        "node {}, ledger {}, generation {}\n\n",
        cut(&page.node, 60),
        page.standing,
        page.generation
    );
    text.push_str(&match look.shape {
        Shape::Narrow => narrow(page, look),
        Shape::Wide => wide(page, look),
    });
    text.push('\n');
    let mut section = |head: &str, lines: Vec<String>, paint: Paint| {
        if lines.is_empty() {
            return;
        }
        if !head.is_empty() {
            text.push('\n');
            text.push_str(&look.colours.paint(paint).on(head));
            text.push('\n');
        }
        for line in lines {
            text.push_str(&match look.shape {
                Shape::Narrow => wrap(&line, LINE, 4),
                Shape::Wide => line,
            });
            text.push('\n');
        }
    };
    section("", sums(page), Paint::None);
    section("", substitutions(page), Paint::None);
    section("what the mode waits for:", unfinished(page), Paint::Bold);
    section("what limits the node:", limits(page), Paint::Red);
    text
}

// --- The table ---

fn narrow(page: &StatusPage, look: &Look) -> String {
    let length = telling_length(page);
    let heads = [
        "GPU", "UUID", "PRODUCT", "HEALTH", "STATE", "HOLDER", "FACE", "SINCE",
    ];
    let mut table = Table::new(heads);
    for unit in &page.units {
        let uuid: String = unit.unit.chars().take(length).collect();
        let product = unit
            .product
            .strip_prefix("NVIDIA ")
            .unwrap_or(&unit.product);
        for row in rows(unit) {
            table.add([
                unit.device.clone(),
                uuid.clone(),
                product.to_owned(),
                health(unit).to_owned(),
                row.state,
                row.hold.map_or_else(none, brief_holder),
                row.face,
                row.hold
                    .map_or_else(none, |hold| brief_time(&hold.since, &look.now)),
            ]);
        }
    }
    table.fit(LINE, &MAY_BE_CUT);
    table.painted(|column, cell| look.colours.paint(paint(column, cell)))
}

fn wide(page: &StatusPage, look: &Look) -> String {
    let heads = [
        "GPU", "UUID", "PRODUCT", "HEALTH", "STATE", "HOLDER", "FACE", "SINCE", "ID",
    ];
    let mut table = Table::new(heads);
    for unit in &page.units {
        for row in rows(unit) {
            let id = row.hold.and_then(|hold| hold.id.clone());
            table.add([
                unit.device.clone(),
                unit.unit.clone(),
                unit.product.clone(),
                health(unit).to_owned(),
                row.state,
                row.hold.map_or_else(none, holder),
                row.face,
                row.hold.map_or_else(none, |hold| seconds(&hold.since)),
                id.or_else(|| unit.id.clone()).unwrap_or_else(none),
            ]);
        }
    }
    table.painted(|column, cell| look.colours.paint(paint(column, cell)))
}

/// A line of the table.
struct Row<'page> {
    state: String,
    face: String,
    hold: Option<&'page HoldPage>,
}

/// One for each hold, or one for a unit that nobody has.
fn rows(unit: &UnitPage) -> Vec<Row<'_>> {
    if unit.holds.is_empty() {
        return vec![Row {
            state: unit.state.clone(),
            face: unit.side.clone(),
            hold: None,
        }];
    }
    let rows = unit.holds.iter().map(|hold| Row {
        state: hold.phase.clone(),
        face: hold.face.clone().unwrap_or_else(none),
        hold: Some(hold),
    });
    rows.collect()
}

/// What NVML says of it, and whether a container could use it.
fn health(unit: &UnitPage) -> &'static str {
    match (unit.present, unit.state.as_str(), &unit.lacks) {
        (true, _, _) if unit.fault.is_some() => "faulty",
        (true, _, None) => "ok",
        (true, _, Some(_)) => "no node",
        (false, "Unseen", _) => "unseen",
        (false, _, _) => "lost",
    }
}

fn paint(column: usize, cell: &str) -> Paint {
    match (column, cell) {
        (HEALTH, "ok") => Paint::Green,
        (HEALTH, _) | (STATE, "Foreign" | "Lost" | "Faulty" | "Unseen") => Paint::Red,
        (STATE, "FreeRest" | "FreeLegacy" | "FreeDra") => Paint::Green,
        (STATE, "Moving" | "Granted" | "Reserved") => Paint::Yellow,
        _ => Paint::None,
    }
}

/// How many characters of the UUIDs tell all units apart.
fn telling_length(page: &StatusPage) -> usize {
    let longest = page.units.iter().map(|unit| unit.unit.chars().count());
    let longest = longest.max().unwrap_or(0);
    let tells = |length: &usize| {
        let short = |unit: &UnitPage| unit.unit.chars().take(*length).collect::<String>();
        let mut all: Vec<String> = page.units.iter().map(short).collect();
        all.sort();
        all.dedup();
        all.len() == page.units.len()
    };
    (SHORT_UUID..longest).find(tells).unwrap_or(longest)
}

fn none() -> String {
    "-".to_owned()
}

/// Who has it, in words.
pub(super) fn holder(hold: &HoldPage) -> String {
    match (hold.cause.as_deref(), named(hold)) {
        (Some("Lingering"), Some(named)) => format!("{named} (ended, its process runs on)"),
        (Some("Lingering"), None) => "a counted pod (ended, its process runs on)".to_owned(),
        (Some("UnknownUnitOf"), Some(named)) => format!("perhaps {named}"),
        (Some(_), _) => "an unknown process".to_owned(),
        (None, Some(named)) => named,
        (None, None) => "a counted pod (not seen yet)".to_owned(),
    }
}

/// The same in few words.
fn brief_holder(hold: &HoldPage) -> String {
    match (hold.cause.as_deref(), named(hold)) {
        (Some("Lingering"), Some(named)) => format!("ended {named}"),
        (Some("Lingering"), None) => "ended counted pod".to_owned(),
        (Some("UnknownUnitOf"), Some(named)) => format!("perhaps {named}"),
        (Some(_), _) => "unknown process".to_owned(),
        (None, Some(named)) => named,
        (None, None) => "counted pod".to_owned(),
    }
}

fn named(hold: &HoldPage) -> Option<String> {
    let name = |holder: &HolderPage| format!("{}/{}", holder.namespace, holder.name);
    match (&hold.pod, &hold.claim) {
        (Some(pod), _) => Some(format!("pod {}", name(pod))),
        (None, Some(claim)) => Some(format!("claim {}", name(claim))),
        (None, None) => None,
    }
}

/// The time without its milliseconds, which nobody wants in a table.
pub(super) fn seconds(time: &str) -> String {
    match time.split_once('.') {
        Some((seconds, _)) => format!("{seconds}Z"),
        None => time.to_owned(),
    }
}

/// The time of today, or the day and the minute, in UTC.
fn brief_time(time: &str, now: &str) -> String {
    let (Some(day), Some(at), Some(minute)) = (time.get(..10), time.get(11..19), time.get(11..16))
    else {
        return time.to_owned();
    };
    match day.get(5..) {
        Some(date) if now.get(..10) != Some(day) => format!("{date} {minute}"),
        Some(_) | None => at.to_owned(),
    }
}

// --- Below the table ---

/// What is free on both faces, the mode, and the configuration in force.
fn sums(page: &StatusPage) -> Vec<String> {
    let counted = page.offers.legacy.iter();
    let counted = counted.filter(|it| it.free && it.health == "Healthy");
    let claims = page.offers.dra.as_ref().map(|devices| {
        let free = devices
            .iter()
            .filter(|it| it.taint.is_none() && !it.held_by_claim);
        free.count()
    });
    let present = page.units.iter().filter(|unit| unit.present).count();
    let limit = |limit: Option<u32>| limit.map_or_else(|| "none".to_owned(), |it| it.to_string());
    let config = page.conditions.iter().find(|it| it.name == "ConfigInForce");
    let config = match config {
        Some(config) if config.limits || !config.ok => "the last good one: see below",
        Some(config) => &config.message,
        None => "unknown",
    };
    // What is not as usual.
    let prefer = match page.allocation.prefer.as_str() {
        "wiring" => String::new(),
        other => format!(", prefer: {other}"),
    };
    vec![
        format!(
            "free: {} for counted pods, {} for claims, of {present} GPUs",
            counted.count(),
            claims.unwrap_or(0)
        ),
        format!(
            "mode: {}, limits: legacy {}, dra {}{prefer}",
            page.mode,
            limit(page.limits.legacy),
            limit(page.limits.dra)
        ),
        format!("config: {config}"),
    ]
}

fn substitutions(page: &StatusPage) -> Vec<String> {
    let line = |unit: &UnitPage| {
        let id = unit.id.as_ref().filter(|id| **id != unit.unit)?;
        Some(format!(
            "The kubelet's id {id} stands for {} ({}) now.",
            unit.device, unit.unit
        ))
    };
    page.units.iter().filter_map(line).collect()
}

/// Who still holds something through a face that the mode has closed, and what is still on its way from it.
fn unfinished(page: &StatusPage) -> Vec<String> {
    let closes = |face: &str| match page.mode.as_str() {
        "drained" => true,
        "dra" => face == "legacy",
        "legacy" => face == "dra",
        _ => false,
    };
    let mut lines = Vec::new();
    for unit in &page.units {
        for hold in &unit.holds {
            let Some(face) = hold.face.as_deref().filter(|face| closes(face)) else {
                continue;
            };
            let since = seconds(&hold.since);
            let (holder, device) = (holder(hold), &unit.device);
            lines.push(format!(
                "  the end of {holder}, which has {device} through {face} since {since}"
            ));
        }
        if unit.state == "Moving" && page.mode != "both" {
            lines.push(format!(
                "  the move of {}, which somebody may still have been promised",
                unit.device
            ));
        }
    }
    lines
}

/// Why the node does less than it could. The word is the name of a page in `migration-guide/reasons`, or of the
/// condition.
fn limits(page: &StatusPage) -> Vec<String> {
    let limiting = page.conditions.iter();
    let limiting = limiting.filter(|condition| condition.limits || !condition.ok);
    let line = |condition: &ConditionPage| {
        let message = &condition.message;
        let word = condition.reason.as_ref().unwrap_or(&condition.name);
        // A sentence of a reason opens with it.
        let sentence = message
            .strip_prefix(word.as_str())
            .and_then(|rest| rest.strip_prefix(": "))
            .unwrap_or(message);
        let since = seconds(&condition.since);
        format!("  {word} since {since}: {sentence}")
    };
    let faults = page.units.iter().filter_map(|unit| {
        let fault = unit.fault.as_ref()?;
        let (since, message) = (seconds(&fault.since), &fault.message);
        Some(format!(
            "  UnitFaulty since {since}: {} ({}): {message}",
            unit.device, unit.unit
        ))
    });
    limiting.map(line).chain(faults).collect()
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::*;

    fn golden() -> StatusPage {
        let golden = include_str!("../../../tests/golden/status.json");
        serde_json::from_str(golden).unwrap()
    }

    fn look(shape: Shape) -> Look {
        Look {
            shape,
            colours: Colours::Off,
            now: "2026-09-21T15:00:00Z".to_owned(),
        }
    }

    fn told(page: &StatusPage) -> String {
        describe(page, &look(Shape::Narrow))
    }

    #[test]
    fn the_table_names_every_holder_in_words() {
        let mut page = golden();
        page.units[1].id = Some("GPU-9".to_owned());
        page.units[3].present = false;
        expect![[r#"
            node node-1, ledger Serving, generation 12

            GPU     UUID    PRODUCT                HEALTH  STATE       HOLDER                                           FACE    SINCE                 ID
            gpu-0   GPU-0   NVIDIA H100 80GB HBM3  ok      Granted     a counted pod (not seen yet)                     legacy  2026-09-21T14:13:20Z  GPU-0
            gpu-1   GPU-1   NVIDIA H100 80GB HBM3  ok      Bound       pod default/counted                              legacy  2026-09-21T14:13:20Z  GPU-1
            gpu-2   GPU-2   NVIDIA H100 80GB HBM3  ok      Reserved    claim train/llm                                  dra     2026-09-21T14:13:20Z  GPU-2
            gpu-3   GPU-3   NVIDIA H100 80GB HBM3  lost    Prepared    claim train/llm                                  dra     2026-09-21T14:13:20Z  GPU-3
            gpu-4   GPU-4   NVIDIA H100 80GB HBM3  ok      Foreign     an unknown process                               -       2026-09-21T14:13:20Z  GPU-4
            gpu-5   GPU-5   NVIDIA H100 80GB HBM3  ok      Foreign     pod default/killed (ended, its process runs on)  -       2026-09-21T14:13:20Z  GPU-5
            gpu-6   GPU-6   NVIDIA H100 80GB HBM3  ok      Foreign     claim train/llm (ended, its process runs on)     -       2026-09-21T14:13:20Z  GPU-6
            gpu-7   GPU-7   NVIDIA H100 80GB HBM3  ok      Foreign     perhaps pod default/old                          -       2026-09-21T14:13:20Z  GPU-7
            gpu-8   GPU-8   NVIDIA H100 80GB HBM3  ok      FreeLegacy  -                                                legacy  -                     GPU-8
            gpu-9   GPU-9   NVIDIA H100 80GB HBM3  ok      FreeDra     -                                                dra     -                     GPU-9
            gpu-10  GPU-10  NVIDIA H100 80GB HBM3  lost    Lost        -                                                dra     -                     GPU-10

            free: 1 for counted pods, 0 for claims, of 9 GPUs
            mode: both, limits: legacy 5, dra none
            config: unknown
            The kubelet's id GPU-9 stands for gpu-1 (GPU-1) now.

            what limits the node:
              NvmlAnswering since 2026-09-21T14:13:22Z: no library: libnvidia-ml.so.1
              NoStatusRight since 2026-09-21T14:13:22Z: the right to patch nodes/status is missing
        "#]].assert_eq(&describe(&page, &look(Shape::Wide)));
    }

    #[test]
    fn the_narrow_table_says_the_same_in_fewer_words() {
        let mut page = golden();
        page.units[3].holds[0].since = "2026-09-20T09:13:20.000Z".to_owned();
        expect![[r#"
            node node-1, ledger Serving, generation 12

            GPU     UUID    PRODUCT         HEALTH  STATE       HOLDER                    FACE    SINCE
            gpu-0   GPU-0   H100 80GB HBM3  ok      Granted     counted pod               legacy  14:13:20
            gpu-1   GPU-1   H100 80GB HBM3  ok      Bound       pod default/counted       legacy  14:13:20
            gpu-2   GPU-2   H100 80GB HBM3  ok      Reserved    claim train/llm           dra     14:13:20
            gpu-3   GPU-3   H100 80GB HBM3  ok      Prepared    claim train/llm           dra     09-20 09:13
            gpu-4   GPU-4   H100 80GB HBM3  ok      Foreign     unknown process           -       14:13:20
            gpu-5   GPU-5   H100 80GB HBM3  ok      Foreign     ended pod default/killed  -       14:13:20
            gpu-6   GPU-6   H100 80GB HBM3  ok      Foreign     ended claim train/llm     -       14:13:20
            gpu-7   GPU-7   H100 80GB HBM3  ok      Foreign     perhaps pod default/old   -       14:13:20
            gpu-8   GPU-8   H100 80GB HBM3  ok      FreeLegacy  -                         legacy  -
            gpu-9   GPU-9   H100 80GB HBM3  ok      FreeDra     -                         dra     -
            gpu-10  GPU-10  H100 80GB HBM3  lost    Lost        -                         dra     -

            free: 1 for counted pods, 0 for claims, of 10 GPUs
            mode: both, limits: legacy 5, dra none
            config: unknown

            what limits the node:
              NvmlAnswering since 2026-09-21T14:13:22Z: no library: libnvidia-ml.so.1
              NoStatusRight since 2026-09-21T14:13:22Z: the right to patch nodes/status is missing
        "#]].assert_eq(&told(&page));
    }

    #[test]
    fn no_line_is_longer_than_100_characters_whatever_the_names_are() {
        let mut page = golden();
        let long = "x".repeat(63);
        page.node.clone_from(&"n".repeat(253));
        for (number, unit) in page.units.iter_mut().enumerate() {
            unit.unit = format!("GPU-3f2a9c1e-0000-4000-8000-00000000000{number:x}");
            unit.product = "NVIDIA RTX PRO 6000 Blackwell Server Edition".to_owned();
            for hold in &mut unit.holds {
                hold.since = "2026-08-01T00:00:00.000Z".to_owned();
                for holder in hold.pod.iter_mut().chain(hold.claim.iter_mut()) {
                    holder.namespace.clone_from(&long);
                    holder.name.clone_from(&long);
                }
            }
        }
        let uuids = telling_length(&page);
        assert_eq!(
            uuids,
            page.units[0].unit.len(),
            "they differ in the last digit"
        );
        for (number, unit) in page.units.iter_mut().enumerate() {
            unit.unit = format!("GPU-{number:08x}-0000-4000-8000-000000000000");
        }
        page.conditions[1].message = "a sentence of many words, ".repeat(20);
        page.mode = "drained".to_owned();
        let told = told(&page);
        for line in told.lines() {
            // A name of 127 characters in a sentence stays whole.
            let words = line.split_whitespace().map(|it| it.chars().count());
            let is_long = words.max().unwrap_or(0) > 90;
            assert!(is_long || line.chars().count() <= LINE, "{line}\n{told}");
        }
        let rows = told.lines().skip(2).take(12);
        let longest = rows.map(|line| line.chars().count()).max().unwrap();
        assert!((90..=LINE).contains(&longest), "{longest}\n{told}");
    }

    #[test]
    fn colours_add_nothing_but_their_codes() {
        let page = golden();
        let mut look = look(Shape::Narrow);
        let plain = describe(&page, &look);
        look.colours = Colours::Shown;
        let coloured = describe(&page, &look);
        assert!(coloured.contains("\x1b[31mForeign\x1b[0m"), "{coloured}");
        assert!(coloured.contains("\x1b[32mFreeDra\x1b[0m"), "{coloured}");
        let mut stripped = coloured;
        for code in ["0", "1", "31", "32", "33"] {
            stripped = stripped.replace(&format!("\x1b[{code}m"), "");
        }
        assert_eq!(stripped, plain);
    }

    #[test]
    fn a_gpu_that_no_container_could_use_is_shown_as_one_without_its_node() {
        let mut page = golden();
        page.units[8].lacks = Some("/dev/nvidia8 is missing".to_owned());
        for shape in [Shape::Narrow, Shape::Wide] {
            let text = describe(&page, &look(shape));
            let mut rows = text.lines().filter(|line| line.contains("  no node  "));
            assert!(
                rows.next().is_some_and(|row| row.starts_with("gpu-8 ")),
                "{text}"
            );
            assert_eq!(rows.next(), None, "{text}");
        }
    }

    #[test]
    fn a_mode_that_closes_a_face_names_whom_it_waits_for() {
        let mut page = golden();
        let waits = |page: &StatusPage| {
            let lines = unfinished(page).into_iter();
            lines
                .map(|line| line.trim_start().to_owned() + "\n")
                .collect::<String>()
        };
        assert_eq!(waits(&page), "", "mode both closes nothing");
        page.mode = "dra".to_owned();
        page.units[8].state = "Moving".to_owned();
        expect![[r#"
              the end of a counted pod (not seen yet), which has gpu-0 through legacy since 2026-09-21T14:13:20Z
              the end of pod default/counted, which has gpu-1 through legacy since 2026-09-21T14:13:20Z
              the move of gpu-8, which somebody may still have been promised
        "#]].assert_eq(&waits(&page));
        page.mode = "legacy".to_owned();
        page.units[8].state = "FreeLegacy".to_owned();
        expect![[r#"
              the end of claim train/llm, which has gpu-2 through dra since 2026-09-21T14:13:20Z
              the end of claim train/llm, which has gpu-3 through dra since 2026-09-21T14:13:20Z
        "#]]
        .assert_eq(&waits(&page));
    }

    #[test]
    fn what_limits_the_node_is_told_below_the_table_until_nothing_does() {
        let mut page = golden();
        assert!(told(&page).contains("what limits the node:"));
        // A daemon from before `limits` says `ok` alone.
        for condition in &mut page.conditions {
            condition.limits = false;
            condition.reason = None;
        }
        let text = told(&page);
        assert!(text.contains("  NvmlAnswering since"), "{text}");
        for condition in &mut page.conditions {
            condition.ok = true;
        }
        assert!(!told(&page).contains("what limits the node"));
    }

    #[test]
    fn free_units_the_mode_and_the_configuration_stand_below_the_table() {
        let mut page = golden();
        let mut config = page.conditions[0].clone();
        config.name = "ConfigInForce".to_owned();
        config.message = "/etc/gpu-bridge/config.yaml is in force".to_owned();
        page.conditions.push(config);
        let sums = sums(&page).join("\n");
        expect![[r#"
            free: 1 for counted pods, 0 for claims, of 10 GPUs
            mode: both, limits: legacy 5, dra none
            config: /etc/gpu-bridge/config.yaml is in force"#]]
        .assert_eq(&sums);
        page.conditions.last_mut().unwrap().limits = true;
        assert!(self::sums(&page)[2].contains("the last good one"));
        page.allocation.prefer = "tail".to_owned();
        expect!["mode: both, limits: legacy 5, dra none, prefer: tail"]
            .assert_eq(&self::sums(&page)[1]);
    }
}

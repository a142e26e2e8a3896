//! `gpu-bridge status --all-nodes`: what is free on each node of a cluster.

use serde::Serialize;

use super::paint::{Colours, Paint};
use super::table::Table;
use crate::daemon::{NodePage, NodeState, Share};

/// The column that may be cut, and down to which width: the node's name.
const MAY_BE_CUT: [(usize, usize); 1] = [(0, 20)];
/// The column of the state.
const STATE: usize = 1;

/// The page for programs. Fields are added, never renamed.
#[derive(Debug, Serialize)]
struct Page<'a> {
    nodes: &'a [NodePage],
}

/// For programs.
pub(super) fn json(nodes: &[NodePage]) -> String {
    let page = serde_json::to_string_pretty(&Page { nodes });
    page.expect("a page of texts and numbers is JSON") + "\n"
}

/// For people; `longest` is the longest line that a name may be cut for.
pub(super) fn describe(nodes: &[NodePage], longest: usize, colours: Colours) -> String {
    if nodes.is_empty() {
        return "No node has GPUs that a device plugin counts as nvidia.com/gpu, or that a slice of gpu.nvidia.com has.\n"
            .to_owned();
    }
    let mut table = Table::new([
        "NODE",
        "STATE",
        "MODE",
        "GPUS",
        "COUNTED HELD",
        "COUNTED FREE",
        "CLAIMS HELD",
        "CLAIMS FREE",
    ]);
    for node in nodes {
        table.add([
            node.node.clone(),
            node.state.as_str().to_owned(),
            node.mode.clone().unwrap_or_else(|| "-".to_owned()),
            node.gpus.to_string(),
            node.counted.held.to_string(),
            node.counted.free.to_string(),
            node.claims.held.to_string(),
            node.claims.free.to_string(),
        ]);
    }
    table.fit(longest, &MAY_BE_CUT);
    let mut text = table.painted(|column, cell| colours.paint(paint(column, cell)));
    let open = || nodes.iter().filter(|it| it.state == NodeState::Ready);
    let free = |of: fn(&NodePage) -> Share| open().map(|it| u64::from(of(it).free)).sum::<u64>();
    let gpus: u64 = nodes.iter().map(|it| u64::from(it.gpus)).sum();
    text.push_str(&format!(
        "\nfree on ready nodes: {} for counted pods, {} for claims, of {gpus} GPUs on {} nodes\n",
        free(|it| it.counted),
        free(|it| it.claims),
        nodes.len(),
    ));
    text
}

fn paint(column: usize, cell: &str) -> Paint {
    match (column, cell) {
        (STATE, "NotReady") => Paint::Red,
        (STATE, "Cordoned") => Paint::Yellow,
        _ => Paint::None,
    }
}

#[cfg(test)]
mod tests {
    use expect_test::expect;

    use super::super::table::LINE;
    use super::*;

    fn node(node: &str, state: NodeState, mode: Option<&str>) -> NodePage {
        NodePage {
            node: node.to_owned(),
            state,
            mode: mode.map(str::to_owned),
            gpus: 8,
            counted: Share { held: 3, free: 2 },
            claims: Share { held: 2, free: 1 },
        }
    }

    #[test]
    fn each_node_has_a_line_and_the_sum_is_of_those_that_take_pods() {
        let nodes = [
            node("gpu-a", NodeState::Ready, Some("both")),
            node("gpu-b", NodeState::NotReady, None),
        ];
        expect![[r#"
            NODE   STATE     MODE  GPUS  COUNTED HELD  COUNTED FREE  CLAIMS HELD  CLAIMS FREE
            gpu-a  Ready     both  8     3             2             2            1
            gpu-b  NotReady  -     8     3             2             2            1

            free on ready nodes: 2 for counted pods, 1 for claims, of 16 GPUs on 2 nodes
        "#]]
        .assert_eq(&describe(&nodes, LINE, Colours::Off));
        let coloured = describe(&nodes, LINE, Colours::Shown);
        assert!(coloured.contains("\x1b[31mNotReady\x1b[0m"), "{coloured}");
        assert!(describe(&[], LINE, Colours::Off).starts_with("No node has GPUs"));
    }

    #[test]
    fn a_long_name_is_cut_to_the_line_and_is_whole_for_programs() {
        let name = "n".repeat(253);
        let nodes = [node(&name, NodeState::Cordoned, Some("drained"))];
        let table = describe(&nodes, LINE, Colours::Off);
        assert!(
            table.lines().all(|line| line.chars().count() <= LINE),
            "{table}"
        );
        assert!(describe(&nodes, usize::MAX, Colours::Off).contains(&name));
        let page: serde_json::Value = serde_json::from_str(&json(&nodes)).unwrap();
        let shown = &page["nodes"][0];
        assert_eq!(shown["node"], *name);
        assert_eq!(
            (&shown["state"], &shown["mode"]),
            (&"Cordoned".into(), &"drained".into())
        );
        assert_eq!(
            (&shown["counted"]["free"], &shown["claims"]["held"]),
            (&2.into(), &2.into())
        );
    }
}

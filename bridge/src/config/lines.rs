//! On which line of a YAML text a key is. The YAML library does not say, once it has read the text.
//!
//! Good for block style, as people write configuration; inside `{...}` and `[...]` it says where that begins. Where it
//! can't tell it says nothing.

/// The number of the line with the last part of a path, counted from 1. A part is a key, or the index of a list
/// member.
pub(super) fn line_of(text: &str, path: &[String]) -> Option<usize> {
    let lines: Vec<&str> = text.lines().collect();
    let mut block = 0..lines.len();
    let mut found = None;
    for part in path {
        let here = |index: &usize| !is_blank(lines[*index]);
        let depth = block
            .clone()
            .find(here)
            .map_or(0, |first| indent(lines[first]));
        let mut beside = block
            .clone()
            .filter(|index| here(index) && indent(lines[*index]) == depth);
        let line = match part.parse::<usize>() {
            Ok(member) => beside.filter(|index| is_member(lines[*index])).nth(member),
            Err(_) => beside.find(|index| has_key(lines[*index], part)),
        };
        let Some(line) = line else {
            // Inside brackets: where they open is good enough. Otherwise it is not known.
            let opening = found.filter(|line: &usize| lines[*line].contains(['{', '[']));
            return opening.map(|line| line + 1);
        };
        // A list may be indented as deep as its key.
        let inside = |index: &usize| {
            is_blank(lines[*index])
                || indent(lines[*index]) > depth
                || (indent(lines[*index]) == depth
                    && is_member(lines[*index])
                    && !is_member(lines[line]))
        };
        let end = (line + 1..block.end)
            .find(|index| !inside(index))
            .unwrap_or(block.end);
        block = line + 1..end;
        found = Some(line);
    }
    found.map(|line| line + 1)
}

fn is_blank(line: &str) -> bool {
    let line = line.trim();
    line.is_empty() || line.starts_with('#') || line == "---"
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

fn is_member(line: &str) -> bool {
    line.trim_start().starts_with('-')
}

fn has_key(line: &str, key: &str) -> bool {
    let line = line.trim_start();
    let quoted = |quote: char| {
        line.strip_prefix(quote)?
            .strip_prefix(key)?
            .strip_prefix(quote)
    };
    line.strip_prefix(key)
        .or_else(|| quoted('"'))
        .or_else(|| quoted('\''))
        .is_some_and(|rest| rest.trim_start().starts_with(':'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_and_members_are_found() {
        let text = "\
# mode: no
---
mode: both
limits:

  # legacy: no
  legacy: 3
  \"dra\": 4
offers: {weights:
  {legacy: 1}}
a:
- x
- y
b:
    - z
c:
  legacy: {x: 1}
";
        let cases = [
            ("mode", Some(3)),
            ("limits", Some(4)),
            ("limits.legacy", Some(7)),
            ("limits.dra", Some(8)),
            ("offers.weights", Some(9)),
            ("a.1", Some(13)),
            ("b.0", Some(15)),
            ("c.legacy", Some(17)),
            ("c.legacy.x", Some(17)),
            ("mode.x", None),
            ("legacy", None),
            ("mode.legacy", None),
            ("b.1", None),
        ];
        for (path, expected) in cases {
            let path: Vec<String> = path.split('.').map(str::to_owned).collect();
            assert_eq!(line_of(text, &path), expected, "{path:?}");
        }
    }
}

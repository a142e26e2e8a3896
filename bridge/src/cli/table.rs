//! Columns of text.

use std::fmt;

use super::paint::Paint;

/// The longest line of what is for people: a terminal of usual width, and a ticket.
pub(super) const LINE: usize = 100;
/// Spaces between two columns.
const GAP: usize = 2;
/// Stands for what was cut out.
const ELLIPSIS: char = '…';

/// A table whose columns are as wide as their widest cell.
#[derive(Debug)]
pub(super) struct Table<const COLUMNS: usize> {
    rows: Vec<[String; COLUMNS]>,
}

impl<const COLUMNS: usize> Table<COLUMNS> {
    /// A table with its heads.
    pub(super) fn new(heads: [&str; COLUMNS]) -> Self {
        Self {
            rows: vec![heads.map(str::to_owned)],
        }
    }

    /// Adds a row at the end.
    pub(super) fn add(&mut self, row: [String; COLUMNS]) {
        self.rows.push(row);
    }

    /// Cuts cells so that no line is longer than so many characters. Only these columns are cut, the first one first, and
    /// none below its least width; so a line is longer if that does not suffice.
    pub(super) fn fit(&mut self, line: usize, may_be_cut: &[(usize, usize)]) {
        for (column, least) in may_be_cut {
            let widths = self.widths();
            let total: usize = widths.iter().map(|width| width + GAP).sum();
            let over = (total - GAP).saturating_sub(line);
            let width = widths[*column].saturating_sub(over).max(*least);
            for row in &mut self.rows {
                row[*column] = cut(&row[*column], width);
            }
        }
    }

    /// The table with colours: of a cell below the heads, by its column and text.
    pub(super) fn painted(&self, paint: impl Fn(usize, &str) -> Paint) -> String {
        let widths = self.widths();
        let mut text = String::new();
        for (number, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            let mut missing = 0;
            for (column, (cell, width)) in row.iter().zip(widths).enumerate() {
                line.push_str(&" ".repeat(missing));
                let paint = match number {
                    0 => Paint::None,
                    _ => paint(column, cell),
                };
                line.push_str(&paint.on(cell));
                missing = width + GAP - cell.chars().count();
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    fn widths(&self) -> [usize; COLUMNS] {
        std::array::from_fn(|column| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0)
        })
    }
}

impl<const COLUMNS: usize> fmt::Display for Table<COLUMNS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.painted(|_, _| Paint::None))
    }
}

/// A text of at most so many characters. What is left out is in the middle: names begin with what they are, and end with
/// what tells them apart.
pub(super) fn cut(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let kept = width.saturating_sub(1);
    let (start, end) = (kept - kept / 2, kept / 2);
    let head = text.chars().take(start);
    let tail = text.chars().skip(length - end);
    head.chain([ELLIPSIS]).chain(tail).collect()
}

/// Breaks a text into lines of at most so many characters, at its spaces; a word that is longer stays whole. All lines but
/// the first are indented by so many spaces.
pub(super) fn wrap(text: &str, line: usize, indent: usize) -> String {
    let mut lines: Vec<String> = Vec::new();
    for paragraph in text.lines() {
        let own = paragraph.len() - paragraph.trim_start().len();
        let own = if lines.is_empty() { own } else { indent };
        let mut current = " ".repeat(own);
        let mut is_empty = true;
        for word in paragraph.split_whitespace() {
            if !is_empty && current.chars().count() + 1 + word.chars().count() > line {
                lines.push(std::mem::replace(&mut current, " ".repeat(indent)));
                is_empty = true;
            }
            if !is_empty {
                current.push(' ');
            }
            current.push_str(word);
            is_empty = false;
        }
        lines.push(current);
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_cut_keeps_its_begin_and_its_end() {
        assert_eq!(cut("pod train/worker-17", 19), "pod train/worker-17");
        assert_eq!(cut("pod train/worker-17", 12), "pod tr…er-17");
        assert_eq!(cut("abc", 1), "…");
        assert_eq!(cut("abc", 0), "…");
    }

    #[test]
    fn a_table_is_cut_where_it_may_be_and_only_as_far_as_needed() {
        let table = |line| {
            let mut table = Table::new(["A", "B", "C"]);
            table.add(["1234567890", "1234567890", "1234567890"].map(str::to_owned));
            table.fit(line, &[(1, 5), (0, 3)]);
            table.to_string().lines().nth(1).unwrap().to_owned()
        };
        assert_eq!(table(34), "1234567890  1234567890  1234567890");
        assert_eq!(table(30), "1234567890  123…90  1234567890");
        assert_eq!(table(27), "1234…890  12…90  1234567890");
        assert_eq!(table(10), "1…0  12…90  1234567890");
    }

    #[test]
    fn long_lines_are_broken_at_their_spaces() {
        assert_eq!(wrap("  one two three", 9, 4), "  one two\n    three");
        assert_eq!(wrap("one\ntwo", 9, 2), "one\n  two");
        assert_eq!(wrap("incomprehensibilities", 9, 2), "incomprehensibilities");
    }
}

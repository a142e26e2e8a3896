//! Columns of text.

use std::fmt;

/// Spaces between two columns.
const GAP: usize = 2;

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
}

impl<const COLUMNS: usize> fmt::Display for Table<COLUMNS> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |column: usize| {
            let cells = self.rows.iter().map(|row| row[column].chars().count());
            cells.max().unwrap_or(0) + GAP
        };
        let widths: [usize; COLUMNS] = std::array::from_fn(width);
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(widths) {
                line.push_str(&format!("{cell:width$}"));
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

//! Plain tables: columns as wide as they must be, two blanks between them.

use crate::doctor::Severity;
use std::fmt::Write;
use truepin::verdict::Judgement;

/// A cell and how it looks.
#[derive(Debug, Clone, Default)]
pub(super) struct Cell {
    text: String,
    style: anstyle::Style,
}

impl<T: ToString> From<T> for Cell {
    fn from(text: T) -> Self {
        Self { text: text.to_string(), style: anstyle::Style::new() }
    }
}

/// A verdict in its colour: the word carries the meaning, the colour only helps the eye.
pub(super) fn judgement(j: Option<Judgement>) -> Cell {
    use anstyle::AnsiColor::{Green, Red, Yellow};
    let Some(j) = j else { return Cell::from("-") };
    let colour = match j {
        Judgement::Held => Green,
        Judgement::Violated => Red,
        Judgement::Inconclusive => Yellow,
    };
    Cell { text: j.name().to_uppercase(), style: colour.on_default().bold() }
}

/// How bad something is, in a column as wide as the longest word.
pub(super) fn severity(s: Severity) -> String {
    use anstyle::AnsiColor::{Cyan, Green, Red, Yellow};
    let colour = match s {
        Severity::Ok => Green,
        Severity::Note => Cyan,
        Severity::Warning | Severity::CannotTell => Yellow,
        Severity::Problem => Red,
    };
    let style = colour.on_default().bold();
    format!("{style}{:11}{style:#}", s.name())
}

/// The table as text, ending in a newline.
pub(super) fn table(header: &[&str], rows: &[Vec<Cell>]) -> String {
    let bold = anstyle::Style::new().bold();
    let head: Vec<Cell> = header.iter().map(|h| Cell { text: (*h).to_owned(), style: bold }).collect();
    let all: Vec<&Vec<Cell>> = std::iter::once(&head).chain(rows).collect();
    let width = |column: usize| {
        all.iter().filter_map(|r| r.get(column)).map(|c| c.text.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let mut text = String::new();
    for row in all {
        for (i, (cell, width)) in row.iter().zip(&widths).enumerate() {
            let Cell { text: content, style } = cell;
            let pad = if i + 1 == row.len() { 0 } else { width - content.chars().count() + 2 };
            let _ = write!(text, "{style}{content}{style:#}{:pad$}", "");
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let rows = [vec!["run/a".into(), Cell::from(2)], vec!["cgroup/long".into(), Cell::from(10)]];
        let plain = anstream::adapter::strip_str(&table(&["OWNER", "N"], &rows)).to_string();
        assert_eq!(plain, "OWNER        N\nrun/a        2\ncgroup/long  10\n");
    }
}

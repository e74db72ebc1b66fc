//! Distances between NUMA nodes: `distances2` (2.x) and `distances` (1.x).

use super::{File, HwlocError, Kind, MOST_NODES, Open, attributes::Attributes};
use crate::nodeset::{NodeId, NodeSet};

/// A matrix of distances as it is read.
#[derive(Default)]
pub(super) struct Matrix {
    /// Kernel numbers, in the order of rows; empty in 1.x: all nodes, in the order of the file.
    indexes: Vec<u32>,
    values: Vec<u32>,
    /// 1.x: how many rows, and what 1.0 is.
    rows: usize,
    base: f64,
}

impl File<'_> {
    /// `distances2` (2.x).
    pub(super) fn matrix_of(&mut self, attributes: &Attributes<'_>) -> Open {
        let is = |name, value| attributes.get(name) == Some(value);
        // Other matrices are bandwidths, or were measured; the kernel's own has had this name since 2.1, and
        // before that none. Kind: 1 from the operating system, 4 latencies.
        let kernels = is("type", "NUMANode")
            && is("indexing", "os")
            && is("kind", "5")
            && attributes.get("name").is_none_or(|n| n == "NUMALatency");
        let kind = if kernels { Kind::Matrix } else { Kind::Other };
        if kernels {
            self.matrix = Matrix::default();
        }
        Open { kind, ..Open::default() }
    }

    pub(super) fn text(&mut self, text: &str) -> Result<(), HwlocError> {
        let kind = self.open.last().map(|o| o.kind).unwrap_or_default();
        if kind != Kind::Indexes && kind != Kind::Values {
            return Ok(());
        }
        for word in text.split_ascii_whitespace() {
            let expected = "a 32-bit number";
            let number = word.parse().map_err(|_| self.value("distances2".into(), "text", word, expected))?;
            let (list, most) = match kind {
                Kind::Indexes => (&mut self.matrix.indexes, MOST_NODES),
                _ => (&mut self.matrix.values, MOST_NODES * MOST_NODES),
            };
            list.push(number);
            if list.len() > most {
                return Err(self.bounds(format!("distances of more than {MOST_NODES} NUMA nodes")));
            }
        }
        Ok(())
    }

    pub(super) fn old_matrix(&mut self, attributes: &Attributes<'_>) -> Result<Open, HwlocError> {
        let rows = self.number::<usize>(attributes, "nbobjs", "a count")?.unwrap_or(0);
        let base = self.number::<f64>(attributes, "latency_base", "a number")?.unwrap_or(0.0);
        // Of several matrices the last of the size wins; which objects it is over is checked at the end.
        self.matrix = Matrix { rows, base, ..Matrix::default() };
        Ok(Open { kind: Kind::OldMatrix, ..Open::default() })
    }

    pub(super) fn old_distance(&mut self, attributes: &Attributes<'_>) -> Result<(), HwlocError> {
        let value = self.number::<f64>(attributes, "value", "a number")?.unwrap_or(0.0) * self.matrix.base;
        let expected = "a distance";
        if !(0.0..=f64::from(u32::MAX)).contains(&value) {
            let text = attributes.get("value").unwrap_or_default();
            return Err(self.value("latency".into(), "value", text, expected));
        }
        if self.matrix.values.len() >= MOST_NODES * MOST_NODES {
            return Err(self.bounds(format!("distances of more than {MOST_NODES} NUMA nodes")));
        }
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "in range by the check above"
        )]
        self.matrix.values.push(value.round() as u32);
        Ok(())
    }

    /// The rows, each in ascending order of node numbers.
    pub(super) fn distances(&mut self) {
        let Matrix { indexes, values, rows, .. } = std::mem::take(&mut self.matrix);
        let ids: Vec<u32> =
            if indexes.is_empty() { self.raw.nodes.iter().map(|n| n.id.0).collect() } else { indexes };
        let is_ours = |id: &u32| self.raw.nodes.iter().any(|n| n.id.0 == *id);
        let distinct: NodeSet = ids.iter().map(|id| NodeId(*id)).collect();
        let whole =
            distinct.len() == ids.len() && ids.len() == self.raw.nodes.len() && ids.iter().all(is_ours);
        if values.is_empty() {
            return;
        }
        if !whole || values.len() != ids.len() * ids.len() || (rows != 0 && rows != ids.len()) {
            let note = "a matrix of distances that is not over the NUMA nodes: left out";
            self.raw.notes.push(note.into());
            return;
        }
        let mut order: Vec<usize> = (0..ids.len()).collect();
        order.sort_by_key(|at| ids[*at]);
        for (at, id) in ids.iter().enumerate() {
            let row = order.iter().map(|to| values[at * ids.len() + to]).collect();
            if let Some(node) = self.raw.nodes.iter_mut().find(|n| n.id.0 == *id) {
                node.distance = Some(row);
            }
        }
    }
}

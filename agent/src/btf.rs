//! Byte offsets of members of the running kernel's structs, out of its BTF (`/sys/kernel/btf/vmlinux`).
//!
//! Problem: the kernel half reads `task_struct` and friends, whose layout differs between kernels, and has no
//! relocations (see `ebpf/src/read.rs`). A wrong offset would be silently wrong evidence.
//! Steps: check the header; index where each type record begins (a record's length follows from its kind); on request
//! find the struct by name, then the member by name, descending into unnamed structs and unions and through
//! typedefs and qualifiers for dotted paths.
//! Invariants: every read is bounded and every walk is limited, so a malformed blob is a [`BtfError`], never a panic
//! or an endless loop; a member that is missing, a bit field, or at different places in two structs of the same name
//! is an error that names it, never a guess.
//!
//! Source: `Documentation/bpf/btf.rst`, `include/uapi/linux/btf.h`. aya-obj reads BTF too but keeps members private.

/// Structs and unions that may lie inside each other without a name; the kernel has four or so.
const MAX_NESTING: u32 = 32;
/// Members that one question may visit; `task_struct` with all inside it has under a thousand. Without it a hostile
/// blob could make 32 levels of 65,535 unnamed members each.
const MAX_VISITS: u32 = 100_000;
/// Typedefs and qualifiers between a member and its type.
const MAX_CHAIN: u32 = 64;
const HEADER_BYTES: usize = 24;

/// Why a blob gave no offset.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BtfError {
    /// Not BTF of this machine's byte order.
    #[error("BTF magic is {found:#06x}, expected 0xeb9f")]
    Magic {
        /// The first two bytes, little-endian.
        found: u16,
    },
    /// A part reaches beyond its container.
    #[error("BTF {what} at byte {at} reaches beyond the end at {end}")]
    Truncated {
        /// Which part.
        what: &'static str,
        /// Where it begins, bytes.
        at: usize,
        /// Where its container ends, bytes.
        end: usize,
    },
    /// A kind of type that this reader does not know, so the length of its record is unknown.
    #[error("BTF type {id} has unknown kind {kind}")]
    Kind {
        /// Number of the type.
        id: usize,
        /// Its kind.
        kind: u32,
    },
    /// A reference to a type that is not there.
    #[error("BTF refers to type {id}, but there are {count}")]
    NoType {
        /// The number.
        id: u32,
        /// How many there are.
        count: usize,
    },
    /// References that do not end, or more of them than any kernel has.
    #[error("BTF types below {name} are nested or chained too deeply")]
    TooDeep {
        /// The struct that was asked for.
        name: String,
    },
    /// The kernel has no such struct.
    #[error("the kernel's BTF has no struct {name}")]
    NoStruct {
        /// The struct.
        name: String,
    },
    /// The struct has no such member.
    #[error("the kernel's BTF has no member {name}.{member}")]
    NoMember {
        /// The struct.
        name: String,
        /// The member, dotted if inside another.
        member: String,
    },
    /// The member does not begin at a byte.
    #[error("{name}.{member} is a bit field (bit {bit})")]
    BitField {
        /// The struct.
        name: String,
        /// The member.
        member: String,
        /// Its offset in bits.
        bit: u64,
    },
    /// Two structs of this name disagree.
    #[error("{name}.{member} is at byte {first} in one struct of that name and at {second} in another")]
    Ambiguous {
        /// The struct.
        name: String,
        /// The member.
        member: String,
        /// One offset, bytes.
        first: u32,
        /// The other.
        second: u32,
    },
}

/// A parsed blob: an index over borrowed bytes.
#[derive(Debug)]
pub struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
    /// Where in `types` each type's record begins; type 0 (`void`) has none.
    records: Vec<u32>,
    /// The numbers of the structs, one type in fifteen: a question looks at these alone.
    structs: Vec<u32>,
}

/// `BTF_KIND_*`
mod kind {
    pub(super) const INT: u32 = 1;
    pub(super) const ARRAY: u32 = 3;
    pub(super) const STRUCT: u32 = 4;
    pub(super) const UNION: u32 = 5;
    pub(super) const ENUM: u32 = 6;
    pub(super) const TYPEDEF: u32 = 8;
    pub(super) const VOLATILE: u32 = 9;
    pub(super) const CONST: u32 = 10;
    pub(super) const RESTRICT: u32 = 11;
    pub(super) const FUNC_PROTO: u32 = 13;
    pub(super) const VAR: u32 = 14;
    pub(super) const DATASEC: u32 = 15;
    pub(super) const DECL_TAG: u32 = 17;
    pub(super) const TYPE_TAG: u32 = 18;
    pub(super) const ENUM64: u32 = 19;
}

/// The fixed head of a type's record: `struct btf_type`.
#[derive(Clone, Copy)]
struct Head {
    name: u32,
    kind: u32,
    vlen: usize,
    kind_flag: bool,
    /// `size`, or `type` for what refers to another.
    referred: u32,
}

fn word(bytes: &[u8], at: usize, what: &'static str) -> Result<u32, BtfError> {
    bytes
        .get(at..)
        .and_then(|b| b.first_chunk::<4>())
        .map(|b| u32::from_le_bytes(*b))
        .ok_or(BtfError::Truncated { what, at, end: bytes.len() })
}

/// `bytes[at..at + len]`, where all three come from the blob.
fn part<'a>(bytes: &'a [u8], at: usize, len: u32, what: &'static str) -> Result<&'a [u8], BtfError> {
    at.checked_add(len as usize).and_then(|end| bytes.get(at..end)).ok_or(BtfError::Truncated {
        what,
        at,
        end: bytes.len(),
    })
}

impl<'a> Btf<'a> {
    /// Checks the header and indexes the types.
    pub fn parse(blob: &'a [u8]) -> Result<Self, BtfError> {
        let found = word(blob, 0, "header")?;
        // The low half; what follows is the version.
        let [low, high, ..] = found.to_le_bytes();
        let magic = u16::from_le_bytes([low, high]);
        if magic != 0xeb9f {
            return Err(BtfError::Magic { found: magic });
        }
        part(blob, 0, 24, "header")?;
        let header = word(blob, 4, "header length")? as usize;
        if header < HEADER_BYTES {
            return Err(BtfError::Truncated { what: "header", at: 0, end: header });
        }
        let section = |offset: usize, length: usize, what| {
            let at = header.saturating_add(word(blob, offset, what)? as usize);
            part(blob, at, word(blob, length, what)?, what)
        };
        let types = section(8, 12, "type section")?;
        let strings = section(16, 20, "string section")?;
        let mut btf = Self { types, strings, records: vec![0], structs: Vec::new() };
        let mut at = 0;
        while at < types.len() {
            let head = btf.head_at(at)?;
            let trailing = match head.kind {
                kind::INT | kind::VAR | kind::DECL_TAG => 4,
                kind::ARRAY => 12,
                kind::STRUCT | kind::UNION | kind::DATASEC | kind::ENUM64 => head.vlen * 12,
                kind::ENUM | kind::FUNC_PROTO => head.vlen * 8,
                // pointer, forward, typedef, qualifiers, function, float, type tag
                2 | 7..=12 | 16 | kind::TYPE_TAG => 0,
                kind => return Err(BtfError::Kind { id: btf.records.len(), kind }),
            };
            let end = at + 12 + trailing;
            if end > types.len() {
                return Err(BtfError::Truncated { what: "type", at, end: types.len() });
            }
            if head.kind == kind::STRUCT {
                // Fits: a record has 12 bytes at the least.
                btf.structs.push(u32::try_from(btf.records.len()).unwrap_or(u32::MAX));
            }
            // Fits: `types` is at most u32::MAX long.
            btf.records.push(u32::try_from(at).unwrap_or(u32::MAX));
            at = end;
        }
        Ok(btf)
    }

    /// Byte offset of `member` (dotted for members of named members) in `struct name`.
    pub fn offset(&self, name: &str, member: &str) -> Result<u32, BtfError> {
        let missing = || BtfError::NoMember { name: name.into(), member: member.into() };
        let (mut found, mut seen) = (None, false);
        for &id in &self.structs {
            let (_, head) = self.resolve(name, id)?;
            if self.string(head.name)? != name.as_bytes() {
                continue;
            }
            seen = true;
            let Some(bit) = self.path(name, id, member)? else { continue };
            if bit % 8 != 0 {
                return Err(BtfError::BitField { name: name.into(), member: member.into(), bit });
            }
            let here = u32::try_from(bit / 8).map_err(|_| missing())?;
            match found {
                Some(first) if first != here => {
                    return Err(BtfError::Ambiguous {
                        name: name.into(),
                        member: member.into(),
                        first,
                        second: here,
                    });
                }
                _ => found = Some(here),
            }
        }
        if seen { found.ok_or_else(missing) } else { Err(BtfError::NoStruct { name: name.into() }) }
    }

    /// Bit offset of a dotted path below type `id`.
    fn path(&self, name: &str, mut id: u32, path: &str) -> Result<Option<u64>, BtfError> {
        let (mut bits, mut visits) = (0, MAX_VISITS);
        for part in path.split('.') {
            let Some((bit, of)) = self.member(name, id, part.as_bytes(), 0, &mut visits)? else {
                return Ok(None);
            };
            bits += bit;
            id = of;
        }
        Ok(Some(bits))
    }

    /// Bit offset and type of a member of struct or union `id`, its unnamed members included.
    fn member(
        &self,
        name: &str,
        id: u32,
        wanted: &[u8],
        depth: u32,
        visits: &mut u32,
    ) -> Result<Option<(u64, u32)>, BtfError> {
        if depth > MAX_NESTING {
            return Err(BtfError::TooDeep { name: name.into() });
        }
        let (at, head) = self.resolve(name, id)?;
        if !matches!(head.kind, kind::STRUCT | kind::UNION) {
            return Ok(None);
        }
        for i in 0..head.vlen {
            *visits = visits.checked_sub(1).ok_or_else(|| BtfError::TooDeep { name: name.into() })?;
            let at = at + 12 + i * 12;
            let label = self.string(word(self.types, at, "member")?)?;
            let of = word(self.types, at + 4, "member")?;
            let raw = word(self.types, at + 8, "member")?;
            // With the flag the upper byte is the width of a bit field, 0 for a plain member.
            let bit = u64::from(if head.kind_flag { raw & 0xff_ffff } else { raw });
            if label.is_empty() {
                if let Some((inner, of)) = self.member(name, of, wanted, depth + 1, visits)? {
                    return Ok(Some((bit + inner, of)));
                }
            } else if label == wanted {
                if head.kind_flag && raw >> 24 != 0 {
                    let member = String::from_utf8_lossy(wanted).into();
                    return Err(BtfError::BitField { name: name.into(), member, bit });
                }
                return Ok(Some((bit, of)));
            }
        }
        Ok(None)
    }

    /// Follows typedefs and qualifiers.
    fn resolve(&self, name: &str, mut id: u32) -> Result<(usize, Head), BtfError> {
        for _ in 0..MAX_CHAIN {
            if id == 0 {
                // void
                return Ok((0, Head { name: 0, kind: 0, vlen: 0, kind_flag: false, referred: 0 }));
            }
            let count = self.records.len();
            let at = *self.records.get(id as usize).ok_or(BtfError::NoType { id, count })? as usize;
            let head = self.head_at(at)?;
            match head.kind {
                kind::TYPEDEF | kind::VOLATILE | kind::CONST | kind::RESTRICT | kind::TYPE_TAG => {
                    id = head.referred;
                }
                _ => return Ok((at, head)),
            }
        }
        Err(BtfError::TooDeep { name: name.into() })
    }

    fn head_at(&self, at: usize) -> Result<Head, BtfError> {
        let info = word(self.types, at + 4, "type")?;
        Ok(Head {
            name: word(self.types, at, "type")?,
            kind: info >> 24 & 0x1f,
            vlen: (info & 0xffff) as usize,
            kind_flag: info >> 31 == 1,
            referred: word(self.types, at + 8, "type")?,
        })
    }

    fn string(&self, at: u32) -> Result<&'a [u8], BtfError> {
        let error = BtfError::Truncated { what: "string", at: at as usize, end: self.strings.len() };
        let tail = self.strings.get(at as usize..).ok_or_else(|| error.clone())?;
        let end = tail.iter().position(|b| *b == 0).ok_or(error)?;
        Ok(&tail[..end])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A blob under construction: types are numbered from 1 as they are added.
    #[derive(Default)]
    struct Blob {
        types: Vec<u8>,
        strings: Vec<u8>,
    }

    impl Blob {
        fn new() -> Self {
            Self { types: Vec::new(), strings: vec![0] }
        }

        fn name(&mut self, s: &str) -> u32 {
            if s.is_empty() {
                return 0;
            }
            let at = u32::try_from(self.strings.len()).unwrap();
            self.strings.extend(s.as_bytes());
            self.strings.push(0);
            at
        }

        fn words(&mut self, words: &[u32]) {
            self.types.extend(words.iter().flat_map(|w| w.to_le_bytes()));
        }

        fn int(&mut self, s: &str) {
            let n = self.name(s);
            self.words(&[n, kind::INT << 24, 4, 32]);
        }

        /// typedef, const, …
        fn to(&mut self, k: u32, s: &str, of: u32) {
            let n = self.name(s);
            self.words(&[n, k << 24, of]);
        }

        fn compound(&mut self, k: u32, flag: bool, s: &str, members: &[(&str, u32, u32)]) {
            let n = self.name(s);
            let vlen = u32::try_from(members.len()).unwrap();
            self.words(&[n, u32::from(flag) << 31 | k << 24 | vlen, 64]);
            for (s, of, bit) in members {
                let n = self.name(s);
                self.words(&[n, *of, *bit]);
            }
        }

        fn bytes(&self) -> Vec<u8> {
            let (t, s) =
                (u32::try_from(self.types.len()).unwrap(), u32::try_from(self.strings.len()).unwrap());
            let mut b = vec![0x9f, 0xeb, 1, 0];
            for w in [24, 0, t, t, s] {
                b.extend(u32::to_le_bytes(w));
            }
            b.extend(&self.types);
            b.extend(&self.strings);
            b
        }
    }

    /// One of each: plain member, typedef'd and const struct, unnamed union in unnamed struct, bit fields.
    fn sample() -> Vec<u8> {
        let mut b = Blob::new();
        b.int("int"); // 1
        b.compound(kind::STRUCT, false, "inner", &[("x", 1, 0), ("y", 1, 32)]); // 2
        b.to(kind::TYPEDEF, "inner_t", 2); // 3
        b.to(kind::CONST, "", 3); // 4
        b.compound(kind::UNION, false, "", &[("left", 1, 0), ("right", 1, 0)]); // 5
        b.compound(kind::STRUCT, false, "", &[("pad", 1, 0), ("", 5, 64)]); // 6
        b.words(&[0, kind::ENUM << 24 | 2, 4, 0, 0, 0, 1]); // 7
        b.words(&[0, kind::ARRAY << 24, 0, 1, 1, 16]); // 8
        let members =
            [("pid", 1, 0), ("in", 4, 96), ("", 6, 256), ("low", 1, 3 << 24 | 512), ("end", 1, 544)];
        b.compound(kind::STRUCT, true, "task", &members); // 9
        b.bytes()
    }

    #[test]
    fn members_at_every_depth() {
        let blob = sample();
        let btf = Btf::parse(&blob).unwrap();
        for (member, byte) in
            [("pid", 0), ("in", 12), ("in.y", 16), ("left", 40), ("right", 40), ("pad", 32), ("end", 68)]
        {
            assert_eq!(btf.offset("task", member), Ok(byte), "{member}");
        }
    }

    #[test]
    fn what_is_missing_is_named() {
        let blob = sample();
        let btf = Btf::parse(&blob).unwrap();
        assert_eq!(btf.offset("tusk", "pid"), Err(BtfError::NoStruct { name: "tusk".into() }));
        for member in ["pod", "in.z", "pid.x", ""] {
            let expected = BtfError::NoMember { name: "task".into(), member: member.into() };
            assert_eq!(btf.offset("task", member), Err(expected));
        }
        let e = btf.offset("task", "in.z").unwrap_err().to_string();
        assert_eq!(e, "the kernel's BTF has no member task.in.z");
        let bit = BtfError::BitField { name: "task".into(), member: "low".into(), bit: 512 };
        assert_eq!(btf.offset("task", "low"), Err(bit));
    }

    #[test]
    fn two_structs_of_one_name_must_agree() {
        let mut b = Blob::new();
        b.int("int");
        b.compound(kind::STRUCT, false, "s", &[("a", 1, 0), ("b", 1, 32)]);
        b.compound(kind::STRUCT, false, "s", &[("a", 1, 0), ("b", 1, 64)]);
        let blob = b.bytes();
        let btf = Btf::parse(&blob).unwrap();
        assert_eq!(btf.offset("s", "a"), Ok(0));
        let expected = BtfError::Ambiguous { name: "s".into(), member: "b".into(), first: 4, second: 8 };
        assert_eq!(btf.offset("s", "b"), Err(expected));
    }

    #[test]
    fn loops_end() {
        let mut b = Blob::new();
        b.to(kind::TYPEDEF, "t", 1); // 1: itself
        b.compound(kind::STRUCT, false, "s", &[("", 2, 0), ("a", 1, 32)]); // 2: inside itself
        b.compound(kind::STRUCT, false, "r", &[("a", 1, 32)]); // 3
        let blob = b.bytes();
        let btf = Btf::parse(&blob).unwrap();
        assert_eq!(btf.offset("s", "z"), Err(BtfError::TooDeep { name: "s".into() }));
        assert_eq!(btf.offset("r", "a.b"), Err(BtfError::TooDeep { name: "r".into() }));
        assert_eq!(btf.offset("r", "a"), Ok(4));
        // Ten levels of four unnamed members each: a million visits.
        let mut b = Blob::new();
        for next in 2..12 {
            b.compound(kind::STRUCT, false, "w", &[("", next, 0); 4]);
        }
        b.compound(kind::STRUCT, false, "", &[("a", 0, 0)]); // 11
        let blob = b.bytes();
        let btf = Btf::parse(&blob).unwrap();
        assert_eq!(btf.offset("w", "z"), Err(BtfError::TooDeep { name: "w".into() }));
    }

    #[test]
    fn what_a_blob_must_be() {
        assert_eq!(Btf::parse(b"").unwrap_err(), BtfError::Truncated { what: "header", at: 0, end: 0 });
        let mut blob = sample();
        blob[0] = 0xeb;
        blob[1] = 0x9f;
        assert_eq!(Btf::parse(&blob).unwrap_err(), BtfError::Magic { found: 0x9feb });
        let mut b = Blob::new();
        b.words(&[0, 25 << 24, 0]);
        assert_eq!(Btf::parse(&b.bytes()).unwrap_err(), BtfError::Kind { id: 1, kind: 25 });
        let mut b = Blob::new();
        b.compound(kind::STRUCT, false, "s", &[("", 77, 0)]);
        let blob = b.bytes();
        let e = Btf::parse(&blob).unwrap().offset("s", "a");
        assert_eq!(e, Err(BtfError::NoType { id: 77, count: 2 }));
    }

    /// No part of a blob is enough: each prefix is refused, or gives an error or the right answer, never another.
    #[test]
    fn truncated_anywhere() {
        let blob = sample();
        let mut refused = 0;
        for end in 0..blob.len() {
            let Ok(btf) = Btf::parse(&blob[..end]) else {
                refused += 1;
                continue;
            };
            assert!(btf.offset("task", "in.y").is_err_and(|e| !e.to_string().is_empty()), "{end}");
        }
        assert_eq!(refused, blob.len(), "the header says how long the sections are");
        // With sections that end early, and the header saying so.
        let types = u32::from_le_bytes(*blob[12..].first_chunk().unwrap());
        let mut errors = 0;
        for end in 0..types {
            let mut cut = blob.clone();
            cut[12..16].copy_from_slice(&end.to_le_bytes());
            errors += u32::from(Btf::parse(&cut).and_then(|b| b.offset("task", "in.y")).is_err());
        }
        assert_eq!(errors, types);
        let strings = u32::from_le_bytes(*blob[20..].first_chunk().unwrap());
        for end in 0..strings {
            let mut cut = blob.clone();
            cut[20..24].copy_from_slice(&end.to_le_bytes());
            let _ = Btf::parse(&cut).and_then(|b| b.offset("task", "in.y"));
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
            let _ = Btf::parse(&bytes).and_then(|b| b.offset("task", "in.y"));
        }

        #[test]
        fn changed_bytes_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
            let mut blob = sample();
            for (at, byte) in changes {
                let at = at.index(blob.len() - 4) + 4; // past the magic
                blob[at] = byte;
            }
            for member in ["pid", "in.y", "right", "end", "zzz"] {
                let _ = Btf::parse(&blob).and_then(|b| b.offset("task", member));
            }
        }
    }

    /// Against something that is known without BTF: two structs that are part of the user interface, and the order
    /// of two members of `task_struct`.
    #[test]
    fn the_running_kernel() {
        use std::io::Write as _;
        let path = "/sys/kernel/btf/vmlinux";
        let blob = match std::fs::read(path) {
            Ok(blob) => blob,
            Err(e) => {
                // Past the harness's capture, so that a skip is never silent.
                writeln!(std::io::stderr(), "skipped: btf::the_running_kernel: {path}: {e}").unwrap();
                return;
            }
        };
        let btf = Btf::parse(&blob).unwrap();
        assert_eq!(btf.offset("__kernel_timespec", "tv_nsec"), Ok(8));
        assert_eq!(btf.offset("list_head", "prev"), Ok(8));
        let at = |m| btf.offset("task_struct", m).unwrap();
        assert_eq!(at("tgid"), at("pid") + 4);
        assert_eq!(at("thread_info"), 0);
        assert!(at("thread_info.cpu") < 64);
        assert!(btf.offset("task_struct", "no_such_member").is_err());
    }
}

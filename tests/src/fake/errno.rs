//! Error numbers.

use std::fmt;

/// An error number of Linux.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Errno(pub i32);

macro_rules! errnos {
    ($($name:ident $number:literal $words:literal),* $(,)?) => {
        impl Errno {
            $(#[doc = $words] pub const $name: Self = Self($number);)*

            /// The symbol, where it is one that cgroup files give.
            #[must_use]
            pub fn symbol(self) -> Option<&'static str> {
                match self.0 { $($number => Some(stringify!($name)),)* _ => None }
            }

            /// In words.
            #[must_use]
            pub fn words(self) -> &'static str {
                match self.0 { $($number => $words,)* _ => "other error" }
            }
        }
    };
}

errnos! {
    EPERM 1 "operation not permitted",
    ENOENT 2 "no such file or directory",
    ESRCH 3 "no such process",
    EIO 5 "input/output error",
    EACCES 13 "permission denied",
    EBUSY 16 "device or resource busy",
    EEXIST 17 "file exists",
    ENODEV 19 "no such device",
    EINVAL 22 "invalid argument",
    ENOSPC 28 "no space left on device",
    ERANGE 34 "numerical result out of range",
    EOVERFLOW 75 "value too large for defined data type",
    EOPNOTSUPP 95 "operation not supported",
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.symbol() {
            Some(symbol) => f.write_str(symbol),
            None => write!(f, "errno {}", self.0),
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

//! What the guest says: one line each, on the second serial port, read on the host as it is written.
//!
//! `ok N - name (1.2 s)`, `not ok N - name # why`, `ok N - name # SKIP what is missing`, comments behind `# `, and at
//! the very end `RESULT passed=N failed=N skipped=N`. A run without that last line did not end, whatever else it said.
//! The comment `# SEEN what | seen | because` is for the table of kernels (`tests/vm/table`).

use std::{
    fmt::Display,
    fs::File,
    io::{self, Write},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// How a suite is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// By people who look for failures: a line for every scenario, remarks behind `# `.
    Tap,
    /// By people who read a story (the demo): what [`super::Guest::say`] says is not behind `# `; whoever shows it leaves
    /// out the scenarios' ends.
    Story,
}

/// Where the lines go. Clones write to the same place; a line is never torn.
#[derive(Clone)]
pub struct Report {
    out: Arc<Mutex<Box<dyn Write + Send>>>,
    style: Style,
}

/// How many scenarios ended how.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// Ended well.
    pub passed: u32,
    /// Ended badly, or not at all.
    pub failed: u32,
    /// Left out, with the reason said.
    pub skipped: u32,
}

impl Report {
    /// A report into a file (the serial port).
    #[must_use]
    pub fn to_file(file: File, style: Style) -> Self {
        Self::new(Box::new(file), style)
    }

    /// A report into anything.
    #[must_use]
    pub fn new(out: Box<dyn Write + Send>, style: Style) -> Self {
        Self { out: Arc::new(Mutex::new(out)), style }
    }

    /// One or several lines as they are. What cannot be reported goes to the console: there is nobody else to tell.
    pub fn line(&self, text: impl Display) {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        let wrote = writeln!(out, "{text}").and_then(|()| out.flush());
        if let Err(e) = wrote {
            eprintln!("{text}\n(this line could not be reported: {e})");
        }
    }

    /// A remark: a plain line in a story, a comment elsewhere.
    pub fn say(&self, text: impl Display) {
        match self.style {
            Style::Story => self.line(text),
            Style::Tap => self.comment(text),
        }
    }

    /// Lines behind `# `.
    pub fn comment(&self, text: impl Display) {
        for line in text.to_string().lines() {
            self.line(format_args!("# {line}"));
        }
    }

    /// What this kernel does where kernels differ, and why it was expected (may be empty).
    pub fn seen(&self, what: &str, seen: impl Display, because: &str) {
        self.line(format_args!("# SEEN {what} | {seen} | {because}"));
    }

    /// A scenario that ended well.
    pub fn passed(&self, number: usize, name: &str, took: Duration) {
        self.line(format_args!("ok {number} - {name} ({:.1} s)", took.as_secs_f64()));
    }

    /// A scenario that was left out.
    pub fn skipped(&self, number: usize, name: &str, missing: &str) {
        self.line(format_args!("ok {number} - {name} # SKIP {}", missing.replace('\n', " ")));
    }

    /// A scenario that failed; the reason's further lines are indented below.
    pub fn failed(&self, number: usize, name: &str, why: &str) {
        self.line(format_args!("not ok {number} - {name} # {}", why.trim_end().replace('\n', "\n#   ")));
    }

    /// The last line.
    pub fn result(&self, count: Count) {
        let Count { passed, failed, skipped } = count;
        self.line(format_args!("RESULT passed={passed} failed={failed} skipped={skipped}"));
    }
}

/// The serial port `path`, raw: what is written arrives as written, without added carriage returns.
pub fn serial(path: &str) -> io::Result<File> {
    use nix::sys::termios;
    let port = File::options().read(true).write(true).open(path)?;
    let mut settings = termios::tcgetattr(&port)?;
    termios::cfmakeraw(&mut settings);
    termios::tcsetattr(&port, termios::SetArg::TCSANOW, &settings)?;
    Ok(port)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A sink that a test can read.
    #[derive(Clone, Default)]
    pub(crate) struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Sink {
        pub(crate) fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn forms() {
        let sink = Sink::default();
        let tap = Report::new(Box::new(sink.clone()), Style::Tap);
        tap.say("two\nlines");
        tap.seen("mode", "member", "no file");
        tap.passed(1, "a", Duration::from_millis(1250));
        tap.failed(2, "b", "why\nmore\n");
        tap.skipped(3, "c", "no BTF");
        tap.result(Count { passed: 1, failed: 1, skipped: 1 });
        let want = "# two\n# lines\n# SEEN mode | member | no file\nok 1 - a (1.2 s)\nnot ok 2 - b # why\n#   more\nok 3 - c # SKIP no BTF\n\
            RESULT passed=1 failed=1 skipped=1\n";
        assert_eq!(sink.text(), want);

        let sink = Sink::default();
        let story = Report::new(Box::new(sink.clone()), Style::Story);
        story.say("Once");
        story.passed(1, "a", Duration::ZERO);
        story.failed(2, "b", "why");
        assert_eq!(sink.text(), "Once\nok 1 - a (0.0 s)\nnot ok 2 - b # why\n");
    }
}

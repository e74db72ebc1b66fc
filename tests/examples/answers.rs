//! Holds the fake to transcripts of real kernels, as the suite `answers` leaves them in its log:
//! `answers compare strict|amended|lax|local LOG...` prints the differences, `answers digest …` the recording for
//! `truth/`, `answers scripts [KINDS FROM TO]...` the shipped scripts or those by chance as text for a guest, and
//! `answers played strict|amended|lax|local FROM TO` what truepin itself does (`sim::played`).
#![allow(clippy::print_stdout, reason = "it prints")]

use std::error::Error;
use truepin_tests::{
    fake::{
        Behaviour, chance,
        script::{self, Script},
        transcript,
    },
    sim::played,
};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    match words[..] {
        ["scripts", ref kinds @ ..] => scripts(kinds),
        [what @ ("compare" | "digest"), behaviour, ref logs @ ..] => {
            let behaviour = named(behaviour)?;
            for log in logs {
                let text = std::fs::read_to_string(log)?;
                let lines = text.lines().filter_map(|l| l.strip_prefix("# "));
                let told: Vec<&str> = lines
                    .skip_while(|l| !l.starts_with("== "))
                    .filter(|l| l.split(' ').next().is_some_and(|w| ["==", ">", "=", "+", "-"].contains(&w)))
                    .collect();
                let report = transcript::compare(&told.join("\n"), behaviour)?;
                if what == "compare" { println!("{report}") } else { print!("{}", report.recording()) }
            }
            Ok(())
        }
        ["played", behaviour, from, to] => {
            let behaviour = named(behaviour)?;
            for seed in from.parse::<u64>()?..=to.parse()? {
                print(played::script(seed, behaviour)?);
            }
            Ok(())
        }
        _ => Err("compare, digest, scripts or played?".into()),
    }
}

fn named(behaviour: &str) -> Result<Behaviour, Box<dyn Error>> {
    Ok(match behaviour {
        "strict" => Behaviour::strict(),
        "amended" => Behaviour::amended(),
        "lax" => Behaviour::lax(),
        "local" => Behaviour::local_only(),
        other => return Err(format!("{other:?} is none of strict, amended, lax, local").into()),
    })
}

fn print(script: Script) {
    println!("== {}", script.name);
    for (line, _) in script.ops {
        println!("{line}");
    }
}

fn scripts(kinds: &[&str]) -> Result<(), Box<dyn Error>> {
    let mut all = if kinds.is_empty() { script::all()? } else { Vec::new() };
    for words in kinds.chunks(3) {
        let [kinds, from, to] = words else { return Err("KINDS FROM TO".into()) };
        for seed in from.parse::<u64>()?..=to.parse()? {
            // `plain` is none of the kinds.
            let kinds = kinds.replace('+', " ").replace("plain", "");
            let name = format!("chance {kinds} {seed}");
            all.push(chance::named(&name).ok_or("no such script")?);
        }
    }
    all.into_iter().for_each(print);
    Ok(())
}

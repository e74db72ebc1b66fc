//! Prints what a script does to the fake kernel, operation by operation, to look into a difference that a guest
//! reported: `trace strict|amended|lax|local NAME` for a shipped script, `trace strict SEED LENGTH [html]` for one by
//! chance (h hotplug, t tree, m members only, l no exclusive lists).
#![allow(clippy::print_stdout, reason = "it prints")]

use std::error::Error;
use truepin_tests::fake::{
    Behaviour, FakeKernel, chance,
    script::{self, FakeWorld},
};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let (behaviour, words) = words.split_first().ok_or("which behaviour?")?;
    let behaviour = match *behaviour {
        "strict" => Behaviour::strict(),
        "amended" => Behaviour::amended(),
        "lax" => Behaviour::lax(),
        "local" => Behaviour::local_only(),
        other => return Err(format!("{other:?} is none of strict, amended, lax, local").into()),
    };
    let script = match words {
        [name] => script::all()?.into_iter().find(|s| s.name == *name).ok_or("no script of this name")?,
        [seed, length, kinds @ ..] => {
            let has = |c| kinds.iter().any(|k| k.contains(c));
            let files = match (has('m'), has('l')) {
                (true, _) => chance::Files::Members,
                (_, true) => chance::Files::Local,
                _ => chance::Files::All,
            };
            let range = chance::Range { hotplug: has('h'), tree: has('t'), files };
            chance::script(seed.parse()?, length.parse()?, range)
        }
        [] => return Err("which script?".into()),
    };
    let kernel = FakeKernel::new(behaviour, "0-7".parse()?, "0-1".parse()?);
    let mut world = FakeWorld::new(kernel).map_err(|e| e.to_string())?;
    let mut last = world.snapshot();
    for (n, (line, op)) in script.ops.iter().enumerate() {
        let result = world.run(op).map_or_else(|e| e.to_string(), |()| "ok".into());
        println!("{} {line}: {result}", n + 1);
        let now = world.snapshot();
        for (key, value) in now.iter().filter(|(key, value)| last.get(*key) != Some(value)) {
            let before = last.get(key).map_or("nothing", String::as_str);
            println!("    {key}: {before:?} -> {value:?}");
        }
        last = now;
    }
    Ok(())
}

//! Prints a script by chance with the fake's state after each operation: `trace SEED LENGTH KIND`.
use truepin_tests::fake::{Behaviour, FakeKernel, chance, script::FakeWorld};
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let k = FakeKernel::new(Behaviour::strict(), "0-7".parse().unwrap(), "0-1".parse().unwrap());
    let kind = a.get(3).cloned().unwrap_or_default();
    let s = chance::script(
        a[1].parse().unwrap(),
        a[2].parse().unwrap(),
        chance::Range { hotplug: kind.contains('h'), tree: kind.contains('t') },
    );
    let mut w = FakeWorld::new(k).unwrap();
    let mut last = w.snapshot();
    for (n, (l, op)) in s.ops.iter().enumerate() {
        let r = w.run(op);
        println!("{} {l} -> {r:?}", n + 1);
        let now = w.snapshot();
        for (k, v) in &now {
            if last.get(k) != Some(v) {
                println!("      {k}: {:?} -> {v:?}", last.get(k).map_or("-", |s| s));
            }
        }
        last = now;
    }
}

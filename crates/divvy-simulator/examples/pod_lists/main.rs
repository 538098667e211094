//! Creates pod lists that are harder to place than a given one, for `divvy simulate`:
//!
//! `cargo run --release -p divvy-simulator --example pod_lists -- NODES.csv[.gz] PODS.csv[.gz] DIRECTORY`

#![allow(clippy::print_stdout)]

mod lists;

use std::fs;
use std::io::Read as _;
use std::path::Path;

use lists::{RowList, choosy, large};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [nodes, pods, directory] = &arguments[..] else {
        panic!("the arguments must be a list of nodes, a list of pods, and a directory");
    };
    let read = |name: &String| {
        let bytes = fs::read(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        let mut text = Vec::new();
        match flate2::read::MultiGzDecoder::new(&*bytes).read_to_end(&mut text) {
            Ok(_) => RowList::read(&text),
            Err(_) => RowList::read(&bytes),
        }
    };
    let (nodes, pods) = (read(nodes), read(pods));
    for percent in [10, 20, 33, 50] {
        write(directory, &format!("choosy{percent}"), &choosy(&nodes, &pods, percent));
    }
    for percent in [20, 30, 50] {
        write(directory, &format!("large{percent}"), &large(&pods, percent));
    }
    write(directory, "choosy33-large30", &choosy(&nodes, &large(&pods, 30), 33));
}

fn write(directory: &str, name: &str, list: &RowList) {
    let path = Path::new(directory).join(format!("{name}.csv"));
    fs::write(&path, list.text()).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    println!("{}", path.display());
}

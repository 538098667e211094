//! Takes the comments out of the kernels: a driver does not need them, and they are a part of what each GPU node downloads.

use std::{env, fs, path::Path};

fn main() {
    let out = env::var_os("OUT_DIR").expect("cargo sets it");
    for name in ["smoke.ptx", "tensor.ptx"] {
        let path = Path::new("src/kernels").join(name);
        println!("cargo::rerun-if-changed={}", path.display());
        let text = fs::read_to_string(&path).expect("the kernels are there");
        // The lines stay, because the driver's compiler names them in its errors.
        let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
        let bare: Vec<&str> = lines.collect();
        fs::write(Path::new(&out).join(name), bare.join("\n")).expect("the directory can be written");
    }
}

//! What is refused, and how.

use divvy_ptx::{EntryCode, Module};

fn with_body(body: &str) -> String {
    format!(
        ".version 6.0\n.target sm_30\n.address_size 64\n.visible .entry k(.param .u64 p, .param .u32 n)\n{{\n.reg .pred %p;\n.reg .b32 %a, %b;\n\
         .reg .b64 %x, %y;\n.reg .f32 %f;\n.shared .align 4 .b8 tile[64];\n{body}\n}}\n"
    )
}

#[test]
fn what_is_not_known_or_wrong_is_refused_with_its_line() {
    let cases = [
        ("foo.u32 %a, %b;", "the instruction foo.u32 is not known"),
        ("add.sat.s32 %a, %a, %b;", "the instruction add.sat.s32 is not known"),
        ("add.u32 %a, %b;", "3 operands are expected"),
        ("add.u32 %a, %b, %x;", "%x has another type"),
        ("add.f32 %a, %f, %f;\nadd.u32 %f, %a, %a;", "%f has another type"),
        ("add.u32 %a, %b, %p;", "%p has another type"),
        ("add.u32 %a, %b, %c;", "%c is no register"),
        ("add.u32 %a, %b, 4294967296;", "does not have 32 bits"),
        ("add.u32 5, %b, 1;", "the result needs a register"),
        ("mov.u32 %a, %ntid.w;", "%ntid is no register"),
        ("mov.u64 %x, %tid.x;", "%tid has another type"),
        ("mov.f32 %f, 1;", "a constant of this kind"),
        ("ld.param.u64 %x, [n];", "n has another size"),
        ("ld.param.u64 %x, [q];", "q is no parameter"),
        ("ld.u32 %a, [%x];", "the instruction ld.u32 is not known"),
        ("ld.global.u32 %a, [%b];", "%b has another type"),
        ("ld.global.v2.u32 %a, [%x];", "other registers are expected"),
        (
            "ld.global.v3.u32 {%a, %a, %a}, [%x];",
            "the instruction ld.global.v3.u32 is not known",
        ),
        ("st.global.u32 [sink], %a;", "sink is no register"),
        ("bra NOWHERE;", "NOWHERE is no label"),
        ("bar.sync 1;", "only barrier 0"),
        ("@%a bra END;\nEND:", "%a has another type"),
        ("END: END: ret;", "END is a label twice"),
        ("red.global.min.u64 %a, [%x], %y;", "is not known"),
        ("red.global.exch.b32 [%x], %a;", "is not known"),
        (".reg .b32 %a;", "declared twice"),
        (".local .b8 stack[16];", "the directive .local is not known"),
        (".shared .b8 more[65536];", "shared memory of this size"),
        (".reg .b32 %r<9999>;", "too many registers"),
        ("add.u32 %a, %b, 1", "';' is expected"),
        ("add.u32 %a, %b, #;", "is no word of PTX"),
    ];
    Module::parse(&with_body("ret;"), |_| false).expect("the frame is right");
    for (body, part) in cases {
        let text = with_body(body);
        let error = Module::parse(&text, |_| false).expect_err(body);
        assert!(error.to_string().contains(part), "{body}: {error}");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(error.text, lines[error.line - 1].trim(), "{error}");
        assert!((11..=13).contains(&error.line), "{body}: {error}");
    }
}

#[test]
fn a_text_that_is_no_module_is_refused() {
    let cases = [
        ("", ".version is expected"),
        (".version 6", "a version such as 6.0"),
        (".version 6.0 .target sm_x", "a target such as sm_30"),
        (".version 6.0 .target sm_30 .address_size 32", "64 bits"),
        (".version 6.0 .target sm_30 .address_size 64 .func f", "the directive .func"),
        (".version 6.0 .target sm_30 .address_size 64 .entry k {", "ends too early"),
        (".version 6.0 .target sm_30 .address_size 64 .entry k {} .entry k {}", "twice"),
    ];
    for (text, part) in cases {
        let error = Module::parse(text, |_| false).expect_err(text);
        assert!(error.to_string().contains(part), "{text}: {error}");
    }
}

#[test]
fn the_body_of_an_entry_can_stay_unread() {
    let text = with_body("foo.u32 {%a, %b};");
    let module = Module::parse(&text, |name| name == "k").expect("a module");
    assert!(matches!(module.entries["k"], EntryCode::Unread));
    assert!(module.kernel("k").is_none());
    Module::parse(&text, |name| name == "other").expect_err("it is read");
}

//! Random programs of two processes on a GPU that is as large as their share: after each call they are charged with what the driver gave them, and the
//! driver never had to refuse.

use proptest::prelude::*;

use crate::sandbox::{CONTEXT, MIB, OUT_OF_MEMORY, Program, Sandbox};

const PAGE: u64 = 2 * MIB;
const SPACE: u64 = 64;

/// A call. The numbers choose among what the process has.
#[derive(Clone, Copy, Debug)]
enum Call {
    Alloc(u64),
    Managed(u64),
    Pitch(u64, u64),
    Async(u64),
    Array(u64),
    Free(usize),
    Sync,
    Create(u64),
    Map(usize, u64),
    Drop(usize),
    Unmap(usize),
    Context,
    Destroy,
}

fn call() -> impl Strategy<Value = Call> {
    let size = MIB..200 * MIB;
    prop_oneof![
        2 => size.clone().prop_map(Call::Alloc),
        3 => (1..MIB).prop_map(Call::Alloc),
        1 => size.clone().prop_map(Call::Managed),
        1 => (1..9000_u64, 1..9000_u64).prop_map(|(width, height)| Call::Pitch(width, height)),
        3 => (1..200 * MIB).prop_map(Call::Async),
        1 => (65536..9_000_000_u64).prop_map(Call::Array),
        6 => any::<usize>().prop_map(Call::Free),
        1 => Just(Call::Sync),
        2 => (1..40_u64).prop_map(Call::Create),
        3 => (any::<usize>(), 0..SPACE).prop_map(|(handle, at)| Call::Map(handle, at)),
        2 => any::<usize>().prop_map(Call::Drop),
        2 => any::<usize>().prop_map(Call::Unmap),
        1 => Just(Call::Context),
        1 => Just(Call::Destroy),
    ]
}

/// A process, and what it has.
struct Player {
    program: Program,
    space: u64,
    /// How each is freed.
    memory: Vec<(&'static str, u64)>,
    handles: Vec<(u64, u64)>,
    mappings: Vec<(u64, u64)>,
    /// A second context, with what was allocated before it.
    context: Option<(u64, Vec<(&'static str, u64)>)>,
}

impl Player {
    fn new(sandbox: &Sandbox) -> Self {
        let mut program = sandbox.ready();
        let [code, space, _] = program.call(&format!("reserve {}", 2 * SPACE * PAGE));
        assert_eq!(code, 0);
        Self {
            program,
            space,
            memory: Vec::new(),
            handles: Vec::new(),
            mappings: Vec::new(),
            context: None,
        }
    }

    fn allocate(&mut self, call: &str, free: &'static str) {
        let [code, pointer, _] = self.program.call(call);
        assert!(code == 0 || code == OUT_OF_MEMORY, "{call}: {code}");
        if code == 0 {
            self.memory.push((free, pointer));
        }
    }

    fn succeed(&mut self, call: &str) {
        assert_eq!(self.program.code(call), 0, "{call}");
    }

    fn play(&mut self, call: Call) {
        match call {
            Call::Alloc(bytes) => self.allocate(&format!("alloc {bytes}"), "free"),
            Call::Managed(bytes) => self.allocate(&format!("managed {bytes}"), "free"),
            Call::Pitch(width, height) => self.allocate(&format!("pitch {width} {height}"), "free"),
            Call::Async(bytes) => self.allocate(&format!("async {bytes}"), "async-free"),
            Call::Array(width) => self.allocate(&format!("array {width} 0"), "array-destroy"),
            Call::Free(which) if !self.memory.is_empty() => {
                let (free, pointer) = self.memory.swap_remove(which % self.memory.len());
                self.succeed(&format!("{free} {pointer}"));
            }
            Call::Sync => self.succeed("sync"),
            Call::Create(pages) => {
                let [code, handle, _] = self.program.call(&format!("create {} 0", pages * PAGE));
                assert!(code == 0 || code == OUT_OF_MEMORY);
                if code == 0 {
                    self.handles.push((handle, pages * PAGE));
                }
            }
            Call::Map(which, at) if !self.handles.is_empty() => {
                let (handle, size) = self.handles[which % self.handles.len()];
                let start = self.space + at * PAGE;
                // Refused where something is mapped already.
                if self.program.code(&format!("map {start} {size} {handle}")) == 0 {
                    self.mappings.push((start, size));
                }
            }
            Call::Drop(which) if !self.handles.is_empty() => {
                let (handle, _) = self.handles.swap_remove(which % self.handles.len());
                self.succeed(&format!("drop {handle}"));
            }
            Call::Unmap(which) if !self.mappings.is_empty() => {
                let (start, size) = self.mappings.swap_remove(which % self.mappings.len());
                self.succeed(&format!("unmap {start} {size}"));
            }
            Call::Context if self.context.is_none() => {
                let [code, context, _] = self.program.call("context 0");
                assert!(code == 0 || code == OUT_OF_MEMORY);
                if code == 0 {
                    self.context = Some((context, std::mem::take(&mut self.memory)));
                }
            }
            Call::Destroy => {
                if let Some((context, before)) = self.context.take() {
                    // What is of a pool is not of the context.
                    let mut kept = before;
                    kept.extend(self.memory.drain(..).filter(|(free, _)| *free == "async-free"));
                    self.memory = kept;
                    self.succeed(&format!("destroy {context}"));
                    assert_eq!(self.program.code("retain 0"), 0);
                }
            }
            _ => {}
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn each_process_is_charged_with_what_the_driver_gave_it(calls in prop::collection::vec((0..2_usize, call()), 1..80)) {
        let share = 2 * CONTEXT + 800 * MIB;
        let sandbox = Sandbox::with_share(share, share);
        let mut players = [Player::new(&sandbox), Player::new(&sandbox)];
        for (index, call) in calls {
            players[index].play(call);
            for player in &players {
                let pid = player.program.pid();
                prop_assert_eq!(sandbox.charged(&player.program), sandbox.driver_gave_to(pid), "process {} after {:?}", index, call);
            }
        }
        prop_assert_eq!(sandbox.refusals(), [""; 0]);
    }
}

//! What the screens show, and how keys and events change them.

use divvy_model::usage::{ContainerUsage, EscapeKind, GpuUsage, Usage};
use divvy_model::{Health, Inventory, Node, Phase, Pod};
use divvy_testkit::nodes::{divvy_node, divvy_pod, edit_gpu, pending};
use divvy_top::{KeyPress, ScreenStyle, TopEvent, TopState, draw, lines};
use divvy_view::{NoUsage, View, WaitingPod, view};
use proptest::prelude::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;

/// The time of the measurements, in Unix time.
const NOW: u64 = 1_795_835_807;
const GIB: u64 = 1 << 30;

fn node(name: &str, gpus: usize) -> Node {
    let mut node = divvy_node(name, &vec![40; gpus]);
    for index in 0..gpus {
        edit_gpu(&mut node, index, |gpu| {
            gpu.model = "NVIDIA A100-SXM4-40GB".to_owned();
            if name == "gpu-c" && index == 1 {
                (gpu.health, gpu.reason) = (Health::Failed, Some("XID 79".to_owned()));
            }
        });
    }
    Node {
        allocatable_units: node.capacity_units,
        allocatable_gpus: node.capacity_gpus,
        ..node
    }
}

fn pod(namespace: &str, name: &str, node: &str, gib: u64, gpu: Option<usize>) -> Pod {
    let mut pod = match gpu {
        Some(index) => divvy_pod(name, node, index, gib),
        None => pending(name, gib),
    };
    pod.request.containers[0].name = "main".to_owned();
    Pod {
        uid: format!("uid-{name}"),
        namespace: namespace.to_owned(),
        node: Some(node.to_owned()),
        phase: Phase::default(),
        ..pod
    }
}

fn cluster() -> View {
    view(
        &[node("gpu-a", 2), node("gpu-b", 1), node("gpu-c", 2)],
        &[
            pod("ml", "train-0", "gpu-a", 24, Some(0)),
            pod("default", "notebook", "gpu-a", 16, Some(1)),
            pod("default", "infer-7c9d", "gpu-a", 8, Some(1)),
            pod("ml", "a-pod-with-a-name-that-is-too-long-for-its-column", "gpu-b", 4, Some(0)),
            pod("default", "starting", "gpu-b", 2, None),
        ],
    )
}

fn container(pod: &str, namespace: &str, gpu: &str, limit: u64, used: u64, busy: u32) -> ContainerUsage {
    ContainerUsage {
        namespace: namespace.to_owned(),
        pod: pod.to_owned(),
        uid: format!("uid-{pod}"),
        container: Some("main".to_owned()),
        gpu: gpu.to_owned(),
        limit_bytes: Some(limit * GIB),
        used_bytes: Some(used),
        peak_bytes: Some(used + GIB),
        busy_percent: Some(busy),
        last_busy: Some(if busy == 0 { NOW - 7200 } else { NOW }),
        ..ContainerUsage::default()
    }
}

fn usage() -> Usage {
    let gpu = |index: usize, used: u64, busy: u32| GpuUsage {
        uuid: format!("GPU-gpu-a-{index}"),
        memory_bytes: Some(40 * GIB),
        used_bytes: Some(used),
        busy_percent: Some(busy),
        power_milliwatts: Some(312_400),
        temperature_celsius: Some(64),
        sm_clock_mhz: Some(1410),
        ..GpuUsage::default()
    };
    let mut infer = container("infer-7c9d", "default", "GPU-gpu-a-1", 8, 9 * GIB, 12);
    infer.escapes.insert(EscapeKind::Unguarded);
    infer.denied = Some(3);
    Usage {
        v: 1,
        sample: 7,
        gpus: vec![gpu(0, 20 * GIB, 91), gpu(1, 11 * GIB, 12)],
        containers: vec![
            container("train-0", "ml", "GPU-gpu-a-0", 24, 19 * GIB + GIB / 2, 91),
            container("notebook", "default", "GPU-gpu-a-1", 16, GIB / 4, 0),
            infer,
        ],
    }
}

fn read(view: View) -> TopEvent {
    TopEvent::Cluster { at: NOW, view }
}

fn waiting() -> TopEvent {
    let pod = |name: &str, seconds, why: &str, help: &[&str]| WaitingPod {
        namespace: "ml".to_owned(),
        name: name.to_owned(),
        seconds,
        why: why.to_owned(),
        help: help.iter().map(|text| (*text).to_owned()).collect(),
    };
    let pods = vec![
        pod(
            "train-large-0",
            Some(2 * 86400),
            "It asks for 48 GiB on one GPU, and no GPU of the cluster has so much memory: the largest one has 40 GiB.",
            &["Ask for at most 40 GiB: kubectl edit"],
        ),
        pod(
            "a-pod-with-a-name-that-is-too-long-for-its-column",
            Some(300),
            "It asks for 32 GiB on one GPU, and the GPU with the most free memory has 24 GiB free. This is GPU 0 on node gpu-c, on which XID 79 was reported 3 \
             times today, so no pod is placed there before somebody repairs it, and GPU 1 on node gpu-a has 16 GiB free.",
            &[
                "When pod default/notebook ends, node gpu-a has room for it: kubectl delete pod -n default notebook",
                "When pod ml/train-0 ends, node gpu-a has room for it: kubectl delete pod -n ml train-0",
                "Ask for at most 24 GiB.",
            ],
        ),
        pod("new", None, "It asks for 2 GiB on one GPU.", &[]),
    ];
    TopEvent::Waiting(pods, None)
}

/// Return a state that has seen the cluster, what is used on one node, and that another node does not answer.
fn state() -> TopState {
    let answered = |node: &str, answer| TopEvent::Usage {
        node: node.to_owned(),
        at: NOW,
        answer,
    };
    [
        read(cluster()),
        answered("gpu-a", Ok(usage())),
        answered("gpu-c", Err(NoUsage::Other("no answer in 5 s".to_owned()))),
    ]
    .into_iter()
    .fold(TopState::default(), TopState::update)
}

fn press(state: TopState, keys: &[KeyPress]) -> TopState {
    keys.iter().fold(state, |state, key| state.update(TopEvent::Key(*key)))
}

fn type_in(state: TopState, text: &str) -> TopState {
    text.chars()
        .fold(state, |state, key| state.update(TopEvent::Key(KeyPress::Char(key))))
}

/// Return what is on a terminal of this size, and the state that knows it.
fn screen_of(state: TopState, columns: u16, rows: u16, style: ScreenStyle) -> (TopState, String) {
    let state = state.update(TopEvent::Size(columns, rows));
    let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("a terminal");
    terminal
        .draw(|frame| draw(&state, style, frame.area(), frame.buffer_mut()))
        .expect("drawn");
    // The backend itself cannot print lines without columns.
    let text = match columns {
        0 => "\n".repeat(usize::from(rows)),
        _ => terminal.backend().to_string(),
    };
    (state, text)
}

fn screen(state: TopState, columns: u16, rows: u16) -> String {
    screen_of(state, columns, rows, ScreenStyle::default()).1
}

#[test]
fn the_cluster_fits_80_columns() {
    insta::assert_snapshot!(screen(state(), 80, 24));
}

#[test]
fn a_wide_terminal_has_wider_names_and_bars() {
    insta::assert_snapshot!(screen(press(state(), &[KeyPress::Char('t')]), 120, 40));
}

#[test]
fn a_narrow_terminal_has_fewer_columns() {
    insta::assert_snapshot!(screen(press(state(), &[KeyPress::Char('t')]), 60, 20));
}

#[test]
fn a_table_has_the_rows_of_the_screen_and_no_end() {
    let tree = press(state(), &[KeyPress::Char('t')]);
    let text = screen(tree.clone(), 80, 24);
    let table = lines(&tree, ScreenStyle::default(), 80);
    assert_eq!(table.len(), 14);
    for (line, row) in text.lines().skip(1).zip(&table) {
        assert_eq!(line.trim_matches('"').trim_end(), row);
    }
    let nodes: Vec<Node> = (0..100).map(|number| node(&format!("gpu-{number:04}"), 1)).collect();
    let many = TopState::default().update(read(view(&nodes, &[])));
    assert_eq!(lines(&many, ScreenStyle::default(), 80).len(), 101);
}

#[test]
fn a_mig_device_has_a_row_with_what_is_used_of_it() {
    let gpu = |uuid: &str, index: u32, profile: &str| {
        format!(
            r#"{{"vendor":"nvidia","uuid":"{uuid}","index":{index},"nodes":["nvidia0"],"pci":"0000:0a:00.0","model":"NVIDIA H100 MIG {profile}","cc":"9.0",
                "totalMiB":9728,"reserveMiB":0,"units":9,"heldMiB":0,"numa":null,"health":"ok","reason":null,"links":[],
                "partition":{{"parent":"GPU-a","profile":"{profile}"}}}}"#
        )
    };
    let gpus = [gpu("MIG-7", 100, "1g.10gb"), gpu("MIG-8", 101, "1g.10gb")].join(",");
    let text = format!(r#"{{"v":2,"agent":"0","drivers":{{"nvidia":"550"}},"unitMiB":1024,"gpus":[{gpus}]}}"#);
    let node = Node {
        inventory: Some(Inventory::parse(&text)),
        allocatable_units: 18,
        capacity_units: 18,
        ..node("gpu-m", 0)
    };
    let used = |uuid: &str, bytes, busy| GpuUsage {
        uuid: uuid.to_owned(),
        memory_bytes: Some(9728 << 20),
        used_bytes: Some(bytes),
        busy_percent: busy,
        ..GpuUsage::default()
    };
    // The GPU that is divided is not counted in addition to its parts.
    let usage = Usage {
        v: 1,
        gpus: vec![
            used("GPU-a", 5 * GIB, Some(9)),
            used("MIG-7", 4 * GIB, Some(25)),
            used("MIG-8", GIB, None),
        ],
        ..Usage::default()
    };
    let state = [
        read(view(&[node], &[])),
        TopEvent::Usage {
            node: "gpu-m".to_owned(),
            at: NOW,
            answer: Ok(usage),
        },
    ]
    .into_iter()
    .fold(TopState::default(), TopState::update);
    insta::assert_snapshot!(lines(&press(state, &[KeyPress::Char('t')]), ScreenStyle::default(), 100).join("\n"));
}

#[test]
fn a_node_shows_its_gpus_with_their_pods() {
    insta::assert_snapshot!(screen(press(state(), &[KeyPress::Enter]), 80, 24));
}

#[test]
fn a_pod_shows_its_containers() {
    insta::assert_snapshot!(screen(
        press(state(), &[KeyPress::Enter, KeyPress::Down, KeyPress::Enter]),
        80,
        24
    ));
}

#[test]
fn all_pods_sorted_by_waste_have_the_most_idle_memory_first() {
    let keys = ['p', 's', 's', 's', 's'].map(KeyPress::Char);
    insta::assert_snapshot!(screen(press(state(), &keys), 80, 24));
}

#[test]
fn the_help_names_all_keys() {
    insta::assert_snapshot!(screen(press(state(), &[KeyPress::Char('?')]), 80, 24));
}

#[test]
fn ascii_is_all_that_a_simple_terminal_gets() {
    let style = ScreenStyle {
        ascii: true,
        color: false,
    };
    let (_, text) = screen_of(press(state(), &[KeyPress::Char('t')]), 80, 24, style);
    assert!(text.is_ascii(), "{text}");
    insta::assert_snapshot!(text);
}

#[test]
fn waiting_pods_have_their_reasons_and_the_best_suggestion() {
    let state = press(state().update(waiting()), &[KeyPress::Char('w'), KeyPress::Down]);
    insta::assert_snapshot!(screen(state.clone(), 80, 24));
    insta::assert_snapshot!(screen(state.clone(), 60, 20));
    // Enter shows all suggestions.
    insta::assert_snapshot!(screen(press(state.clone(), &[KeyPress::Enter]), 80, 24));
    let style = ScreenStyle {
        ascii: true,
        color: false,
    };
    assert!(screen_of(state, 80, 24, style).1.is_ascii());
}

#[test]
fn a_table_is_followed_by_the_waiting_pods() {
    let table = lines(&state(), ScreenStyle::default(), 80);
    let with = lines(&state().update(waiting()), ScreenStyle::default(), 80);
    assert_eq!(with[..table.len()], table);
    insta::assert_snapshot!(with[table.len()..].join("\n"));
    assert!(with.iter().all(|line| line.chars().count() <= 80));
    let none = state().update(TopEvent::Waiting(Vec::new(), None));
    assert_eq!(lines(&none, ScreenStyle::default(), 80), table);
}

#[test]
fn waiting_pods_are_read_only_while_a_screen_shows_them() {
    let open = press(state(), &[KeyPress::Char('w')]);
    assert!(!state().wants_waiting() && open.wants_waiting());
    assert!(open.wanted().is_empty());
    assert!(screen(open.clone(), 80, 24).contains("The waiting pods are being read."));
    let why = press(open.clone().update(waiting()), &[KeyPress::Enter]);
    assert!(why.wants_waiting());
    assert!(!press(open.clone(), &[KeyPress::Esc]).wants_waiting());
    assert!(!press(open, &[KeyPress::Char('p')]).wants_waiting());
    // The pod does not wait any more.
    let gone = why.update(TopEvent::Waiting(Vec::new(), None));
    assert!(screen(gone, 80, 24).contains("No pod waits for GPUs."));
}

#[test]
fn what_is_not_known_of_the_waiting_pods_is_said_as_a_whole() {
    let unknown = "it is not known which pods wait: you lack the right to list nodes in the whole cluster; ask an administrator for the role";
    let state = press(state(), &[KeyPress::Char('w')]).update(TopEvent::Waiting(Vec::new(), Some(unknown.to_owned())));
    let text = screen(state, 60, 20).replace(['"', '\n'], " ");
    let words: Vec<&str> = text.split_whitespace().collect();
    assert!(words.join(" ").contains(unknown), "{text}");
}

#[test]
fn sorted_by_age_the_oldest_pod_comes_first_with_its_age() {
    let created = |pod: Pod, before: u64| Pod {
        created_s: u32::try_from(NOW - before).ok().and_then(std::num::NonZeroU32::new),
        ..pod
    };
    let pods = [
        created(pod("ml", "young", "gpu-a", 1, Some(0)), 50),
        created(pod("ml", "old", "gpu-b", 1, Some(0)), 3 * 86400),
        pod("ml", "unknown", "gpu-a", 1, Some(0)),
        created(pod("ml", "starting", "gpu-a", 1, None), 7200),
    ];
    let state = TopState::default().update(read(view(&[node("gpu-a", 1), node("gpu-b", 1)], &pods)));
    let by_age = press(state, &["s"; 5].map(|_| KeyPress::Char('s')));
    let names = |state: TopState| -> Vec<String> {
        let text = screen(state, 80, 24);
        let rows = text.lines().skip(2).map(|line| line.trim_matches('"').to_owned());
        rows.take_while(|line| !line.trim().is_empty()).collect()
    };
    let rows = names(by_age.clone());
    assert!(rows[0].starts_with("gpu-b") && rows[1].starts_with("gpu-a"), "{rows:?}");
    let rows = names(press(by_age, &[KeyPress::Char('p')]));
    let begins: Vec<&str> = rows.iter().filter_map(|row| row.split(' ').next()).collect();
    assert_eq!(begins, ["ml/old", "ml/starting", "ml/young", "ml/unknown"]);
    assert!(rows[0].ends_with("3 d") || rows[0].contains(" 3 d "), "{rows:?}");
}

/// A line gives the reason for the dashes.
#[test]
fn without_agent_rights_used_columns_are_dashes() {
    let notice = "USED and BUSY need the right to get pods/proxy in the namespace divvy-system";
    let state = TopState::default()
        .update(read(cluster()))
        .update(TopEvent::Refused(notice.to_owned()));
    let text = screen(state, 80, 24);
    assert!(text.contains(notice), "{text}");
    let row = text.lines().find(|line| line.contains("gpu-a")).expect("the node");
    assert!(row.contains("48/80 GiB") && row.matches('–').count() == 2, "{row}");
}

#[test]
fn a_terminal_without_columns_or_rows_shows_nothing() {
    for (columns, rows) in [(0, 0), (0, 24), (80, 0), (1, 1), (2, 2), (19, 3), (80, 1), (80, 2)] {
        for keys in [
            &[][..],
            &[KeyPress::Char('?')],
            &[KeyPress::Char('t')],
            &[KeyPress::Char('/')],
        ] {
            let text = screen(press(state(), keys), columns, rows);
            assert_eq!(text.lines().count(), usize::from(rows), "{columns} {rows}");
        }
    }
}

#[test]
fn only_nodes_on_the_screen_are_asked() {
    let nodes: Vec<Node> = (0..5000).map(|number| node(&format!("gpu-{number:04}"), 1)).collect();
    let state = TopState::default()
        .update(TopEvent::Size(80, 24))
        .update(read(view(&nodes, &[])));
    let wanted: Vec<String> = state.wanted().into_iter().collect();
    assert_eq!(wanted.len(), 21);
    assert_eq!((wanted[0].as_str(), wanted[20].as_str()), ("gpu-0000", "gpu-0020"));
    let state = press(state, &[KeyPress::PageDown, KeyPress::PageDown]);
    assert_eq!(state.wanted().first().map(String::as_str), Some("gpu-0022"));
    let state = press(state, &[KeyPress::End, KeyPress::Enter]);
    assert_eq!(state.wanted().into_iter().collect::<Vec<_>>(), ["gpu-4999"]);
}

#[test]
fn the_cursor_stays_on_its_row_when_others_come() {
    let state = press(state(), &[KeyPress::Down]);
    let more = view(&[node("gpu-0", 1), node("gpu-a", 2), node("gpu-b", 1), node("gpu-c", 2)], &[]);
    let state = press(state.update(read(more)), &[KeyPress::Enter]);
    let text = screen(state, 80, 24);
    assert!(text.contains("node gpu-b"), "{text}");
}

#[test]
fn a_screen_whose_node_or_pod_has_gone_is_left() {
    let gone = view(&[node("gpu-b", 1)], &[]);
    for keys in [&[KeyPress::Enter][..], &[KeyPress::Enter, KeyPress::Down, KeyPress::Enter]] {
        let before = press(state(), keys);
        assert!(!screen(before.clone(), 80, 24).contains("  cluster"));
        let text = screen(before.update(read(gone.clone())), 80, 24);
        assert!(text.contains("divvy top  cluster"), "{text}");
    }
}

#[test]
fn a_filter_keeps_the_rows_with_its_text_until_it_is_removed() {
    let typed = type_in(state(), "/gpu-b");
    let text = screen(typed.clone(), 80, 24);
    assert!(
        text.contains("gpu-b ") && !text.contains("gpu-a") && text.contains("/gpu-b"),
        "{text}"
    );
    let text = screen(press(typed.clone(), &[KeyPress::Enter]), 80, 24);
    assert!(text.contains("filter: gpu-b") && !text.contains("gpu-a"), "{text}");
    let text = screen(press(typed, &[KeyPress::Enter, KeyPress::Esc]), 80, 24);
    assert!(text.contains("gpu-a") && !text.contains("filter:"), "{text}");
    // While the user types a filter, characters are not commands.
    assert!(!type_in(state(), "/q").is_done());
    assert!(type_in(state(), "q").is_done());
    assert!(press(type_in(state(), "/q"), &[KeyPress::Interrupt]).is_done());
}

#[test]
fn no_text_of_a_node_moves_the_cursor() {
    let hostile = "bad\u{1b}[2J\u{202e}\n\tname";
    let mut shown = cluster();
    let node = std::sync::Arc::make_mut(&mut shown.nodes[0]);
    node.driver_trouble = Some(hostile.to_owned());
    node.gpus[0].model = Some(hostile.to_owned());
    let state = TopState::default()
        .update(read(shown))
        .update(TopEvent::Trouble(Some(hostile.to_owned())));
    let text = screen(press(state, &[KeyPress::Char('t')]), 120, 24);
    assert!(text.contains("bad\\u{1b}[2J"), "{text}");
    assert!(!text.contains(['\u{1b}', '\u{202e}', '\t']), "{text:?}");
}

fn events() -> impl Strategy<Value = Vec<TopEvent>> {
    let keys = prop_oneof![
        prop::sample::select("q?/stpwkjgGx".chars().collect::<Vec<_>>()).prop_map(KeyPress::Char),
        prop::sample::select(vec![
            KeyPress::Enter,
            KeyPress::Esc,
            KeyPress::Backspace,
            KeyPress::Up,
            KeyPress::Down,
            KeyPress::PageUp,
            KeyPress::PageDown,
            KeyPress::Home,
            KeyPress::End
        ]),
    ];
    let usage = (any::<u64>(), any::<u64>(), 0..=100_u32).prop_map(|(limit, used, busy)| {
        let mut usage = usage();
        usage.containers[0].limit_bytes = Some(limit);
        usage.containers[0].used_bytes = Some(used);
        usage.gpus[0].used_bytes = Some(used);
        usage.gpus[0].busy_percent = Some(busy);
        usage
    });
    let event = prop_oneof![
        8 => keys.prop_map(TopEvent::Key),
        1 => (0..200_u16, 0..60_u16).prop_map(|(columns, rows)| TopEvent::Size(columns, rows)),
        1 => prop::sample::subsequence(vec![node("gpu-a", 2), node("gpu-b", 1), node("gpu-c", 2)], 0..=3)
            .prop_map(|nodes| read(view(&nodes, &[pod("ml", "train-0", "gpu-a", 24, Some(0))]))),
        1 => Just(waiting()),
        1 => Just(TopEvent::Waiting(Vec::new(), Some("it is not known".to_owned()))),
        1 => (any::<u64>(), usage).prop_map(|(at, usage)| TopEvent::Usage { node: "gpu-a".to_owned(), at, answer: Ok(usage) }),
    ];
    prop::collection::vec(event, 0..60)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_state_can_be_drawn_and_shows_its_cursor(events in events(), columns in 0..200_u16, rows in 0..60_u16) {
        let state = events.into_iter().fold(state(), TopState::update);
        let (state, _) = screen_of(state, columns, rows, ScreenStyle { ascii: false, color: true });
        prop_assert!(state.wanted().len() <= usize::from(rows));
        // The selected row is the one in reverse.
        let state = press(state.update(TopEvent::Size(80, 24)), &[KeyPress::Esc]);
        let mut terminal = Terminal::new(TestBackend::new(80, 24)).expect("a terminal");
        terminal.draw(|frame| draw(&state, ScreenStyle::default(), frame.area(), frame.buffer_mut())).expect("drawn");
        let buffer = terminal.backend().buffer();
        let is_reversed = |line: u16| buffer[(0, line)].modifier.contains(ratatui::style::Modifier::REVERSED);
        let marked = (0..24).filter(|line| is_reversed(*line)).count();
        let has_rows = !state.wanted().is_empty();
        prop_assert!(marked <= 1 && (marked == 1 || !has_rows), "{} rows are marked", marked);
    }
}

use super::*;

const R: &str = "x.example/r";

fn holder(pod: &str) -> Holder {
    Holder {
        pod: pod.to_owned(),
        container: "a".to_owned(),
        resource: R.to_owned(),
    }
}

fn device(id: &str, health: &str) -> Device {
    Device {
        id: id.to_owned(),
        health: health.to_owned(),
        topology: None,
    }
}

fn set(ids: &[&str]) -> BTreeSet<String> {
    ids.iter().map(|id| (*id).to_owned()).collect()
}

fn books(devices: &[Device]) -> DeviceBooks {
    let mut books = DeviceBooks::default();
    let options = DevicePluginOptions {
        pre_start_required: true,
        get_preferred_allocation_available: true,
    };
    books.connected(R, options);
    books.devices(R, devices);
    books
}

fn two() -> DeviceBooks {
    books(&[device("0", "Healthy"), device("1", "Healthy")])
}

fn begin(books: &mut DeviceBooks, pod: &str, wanted: usize) -> Result<Next, DeviceError> {
    books.begin(holder(pod), wanted, false, false, &mut Dice::new(1))
}

fn allocate(books: &mut DeviceBooks, pod: &str, wanted: usize) -> BTreeSet<String> {
    let request = match begin(books, pod, wanted).expect("begin") {
        Next::Ask { request, .. } => books.preferred(request, &[], &mut Dice::new(1)).expect("preferred"),
        Next::Allocate(request) => request,
        Next::Nothing => panic!("nothing"),
    };
    let taken = request.taken.clone();
    books.record(request, ContainerAllocateResponse::default());
    taken
}

#[test]
fn each_refusal_has_the_kubelets_text() {
    let text = |result: Result<Next, DeviceError>| result.expect_err("refused").to_string();
    assert_eq!(
        text(begin(&mut DeviceBooks::default(), "p", 1)),
        "cannot allocate unregistered device x.example/r"
    );
    assert_eq!(
        text(begin(&mut books(&[device("0", "Unhealthy")]), "p", 1)),
        "no healthy devices present; cannot allocate unhealthy devices x.example/r"
    );
    let mut full = two();
    allocate(&mut full, "p", 1);
    assert_eq!(
        text(begin(&mut full, "q", 2)),
        "requested number of devices unavailable for x.example/r. Requested: 2, Available: 1"
    );
    assert_eq!(
        text(begin(&mut full, "p", 2)),
        "pod \"p\" container \"a\" changed request for resource \"x.example/r\" from 1 to 2"
    );
    let held = full
        .holders()
        .values()
        .flat_map(|held| held.ids.iter().cloned())
        .collect::<Vec<_>>();
    let other = if held == ["0"] { "1" } else { "0" };
    full.devices(R, &[device(&held[0], "Unhealthy"), device(other, "Healthy")]);
    assert_eq!(
        text(begin(&mut full, "p", 1)),
        "previously allocated devices are no longer healthy; cannot allocate unhealthy devices x.example/r"
    );
}

#[test]
fn what_a_container_holds_is_not_allocated_again() {
    let mut books = two();
    allocate(&mut books, "p", 1);
    // A container is created again while the plugin is up, for example after a reboot.
    assert!(matches!(begin(&mut books, "p", 1), Ok(Next::Nothing)));
    // The kubelet restarts while the container is running, and the plugin has not registered again.
    let held = books.holders().clone();
    let mut restored = DeviceBooks::restore(Bugs::default(), 0, held, [R.to_owned()]);
    let mut begin = |running| restored.begin(holder("p"), 1, true, running, &mut Dice::new(1));
    assert!(matches!(begin(true), Ok(Next::Nothing)));
    assert_eq!(
        begin(false).expect_err("no healthy device"),
        DeviceError::NoneHealthy(R.to_owned())
    );
    assert_eq!(restored.pre_start(&holder("p")), Ok(None), "the options are unknown");
}

#[test]
fn preferences_are_intersected_cut_and_filled() {
    let all: Vec<Device> = (0..6).map(|i| device(&i.to_string(), "Healthy")).collect();
    for (answer, wanted, certain) in [
        (vec!["3", "4"], 2, set(&["3", "4"])),
        (vec!["3", "nonsense"], 2, set(&["3"])),
        (vec!["5"], 3, set(&["5"])),
        (vec![], 2, set(&[])),
    ] {
        let mut books = books(&all);
        let Ok(Next::Ask { request, available }) = begin(&mut books, "p", wanted) else {
            panic!("the plugin is not called")
        };
        assert_eq!(available.len(), 6);
        let answer: Vec<String> = answer.into_iter().map(str::to_owned).collect();
        let request = books.preferred(request, &answer, &mut Dice::new(1)).expect("preferred");
        assert_eq!(request.taken.len(), wanted);
        assert!(certain.is_subset(&request.taken), "{:?}", request.taken);
    }
    let mut books = books(&all);
    let Ok(Next::Ask { request, .. }) = begin(&mut books, "p", 2) else {
        panic!("the plugin is not called")
    };
    let wished: Vec<String> = ["1", "2", "3"].map(str::to_owned).to_vec();
    let taken = books.preferred(request, &wished, &mut Dice::new(1)).expect("preferred").taken;
    assert!(taken.is_subset(&wished.into_iter().collect()) && taken.len() == 2);
}

#[test]
fn a_failed_call_gives_the_ids_back() {
    let mut books = two();
    assert!(matches!(begin(&mut books, "p", 2), Ok(Next::Ask { .. })));
    books.give_up();
    assert_eq!(allocate(&mut books, "q", 2).len(), 2);
    assert!(books.forget_all_but(&set(&[])));
    assert_eq!(allocate(&mut books, "r", 2).len(), 2);
}

#[test]
fn a_stream_that_ends_leaves_capacity_until_the_grace_is_over() {
    let mut books = two();
    let of = |books: &mut DeviceBooks, now| books.capacity(now, 300_000);
    assert_eq!(of(&mut books, 0).0[R], (2, 2));
    books.disconnected(R, 1_000);
    assert_eq!(of(&mut books, 301_000).0[R], (2, 0));
    let (capacity, removed) = of(&mut books, 301_001);
    assert!(capacity.is_empty() && removed == [R]);
    assert!(!books.knows(R));
}

#[test]
fn resource_names_are_checked_as_kubernetes_does() {
    for (name, good) in [
        ("aliyun.com/gpu-mem", true),
        ("nvidia.com/gpu", true),
        ("gpu", false),
        ("kubernetes.io/gpu", false),
        ("x.kubernetes.io/gpu", false),
        ("requests.example/gpu", false),
        ("example.com/", false),
        ("example.com/-gpu", false),
        ("Example.com/gpu", false),
        ("a/b/c", false),
    ] {
        assert_eq!(is_extended_resource(name), good, "{name}");
    }
    assert!(!is_extended_resource(&format!("example.com/{}", "x".repeat(64))));
}

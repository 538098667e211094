//! Interleavings that random histories reach too rarely, or that once revealed a bug.

use divvy_model::ContainerKind::{App, Sidecar};
use divvy_model::{Health, MiB, Pod};

use divvy_torture::extender::late_write;
use divvy_torture::ops::{ContainerEnding, EventMix, Fate, Forgery, HistoryOp, OpHistory};
use divvy_torture::proxy::ProxyResponse;
use divvy_torture::world::{World, request};
use divvy_torture::{Violation, failure_of};

/// The position of the node that has two GPUs.
const NODE: usize = 1;

fn create(name: u8, shape: u8, priority: u8) -> HistoryOp {
    HistoryOp::Create { name, shape, priority }
}

fn hurry(pod: u8, steps: u8, luck: u8) -> HistoryOp {
    HistoryOp::Hurry { pod, steps, luck }
}

fn schedule(pod: u8, node: u8, replica: u8) -> HistoryOp {
    HistoryOp::Schedule {
        pod,
        node,
        lost: false,
        replica,
    }
}

fn called(call: u8, fate: Fate) -> HistoryOp {
    HistoryOp::Call { call, fate }
}

fn to_extender(replica: u8, pods: u8, nodes: u8) -> HistoryOp {
    HistoryOp::ToExtender { replica, pods, nodes }
}

fn forge(name: u8, shape: u8, node: u8, gpu: u8, how: Forgery) -> HistoryOp {
    HistoryOp::Forge {
        name,
        shape,
        node,
        gpu,
        how,
    }
}

fn create_and_bind(world: &mut World, name: &str, units: u64) -> Result<String, Violation> {
    let uid = world
        .api
        .create(name, request(&[("m", App, units)]), 0)
        .ok_or("the name is taken")?;
    world.see_all()?;
    let pod = world.api.pod(&uid).ok_or("no pod")?.clone();
    world.bind(0, &pod, NODE)?;
    world.answer_all()?;
    Ok(uid)
}

fn kubelet_sees(world: &mut World) -> Result<(), Violation> {
    let World { api, nodes, story, .. } = world;
    nodes[NODE].kubelet_sees(api, usize::MAX, 1, story)
}

fn work(world: &mut World, uid: &str) -> Result<(), Violation> {
    let World { api, nodes, story, .. } = world;
    nodes[NODE].work(api, uid, 1, story)?;
    nodes[NODE].answer_starts(api, story)?;
    world.check()
}

fn call(world: &mut World, fate: Fate) -> Result<(), Violation> {
    let World {
        api, extenders, story, ..
    } = world;
    extenders[0].call(api, 0, fate, story)
}

fn sweep(world: &mut World) -> Result<(), Violation> {
    let World {
        api, extenders, story, ..
    } = world;
    extenders[0].sweep(api, story)
}

fn told(story: impl FnOnce(&mut World) -> Result<(), Violation>) {
    let mut world = World::new(EventMix::Everything, true).expect("a world");
    if let Err(text) = story(&mut world) {
        panic!("{text}\n{}", world.story.lines().join("\n"));
    }
}

/// Between PreStartContainer and the moment at which the runtime reads the spec, the pod is force-deleted, and the kubelet gives
/// its ids to a pod on another GPU.
#[test]
fn reused_ids_do_not_move_a_starting_container() {
    told(|world| {
        // Best fit: the first pod takes from the small GPU, on which the second pod no longer fits.
        let first = create_and_bind(world, "first", 3)?;
        kubelet_sees(world)?;
        work(world, &first)?;
        work(world, &first)?;
        assert!(!world.nodes[NODE].creating.is_empty(), "granted, not yet created");
        let second = create_and_bind(world, "second", 3)?;
        world.api.remove(&first);
        // Only the first pod's ids are left, as if others had the rest.
        let ids = world.nodes[NODE].kubelet.handouts[0].ids.clone();
        world.nodes[NODE].kubelet.healthy = ids;
        kubelet_sees(world)?;
        work(world, &second)?;
        work(world, &second)?;
        work(world, &first)?;
        world.quiet()
    });
}

/// A sidecar has exited, and the kubelet is restarting it when the last app container ends. The pod must not count as ended yet: its worker
/// first completes the restart, then ends the sidecar, and only then writes the pod's status.
#[test]
fn a_pod_has_not_ended_while_its_sidecar_is_being_created() {
    told(|world| {
        let request = request(&[("s", Sidecar, 2), ("m", App, 1)]);
        let uid = world.api.create("first", request, 0).ok_or("the name is taken")?;
        world.see_all()?;
        let pod = world.api.pod(&uid).ok_or("no pod")?.clone();
        world.bind(0, &pod, NODE)?;
        world.answer_all()?;
        kubelet_sees(world)?;
        // The sandbox, then a grant and a create for each container.
        for _ in 0..5 {
            work(world, &uid)?;
        }
        let end = |world: &mut World, container: &str| {
            let World { api, nodes, story, .. } = world;
            let running = &nodes[NODE].cgroups[&uid].running;
            let at = running.keys().position(|name| name == container).expect("it runs");
            nodes[NODE].end(api, &uid, at, ContainerEnding::Well, story);
        };
        end(world, "s");
        work(world, &uid)?;
        assert!(!world.nodes[NODE].creating.is_empty(), "granted, not yet created");
        end(world, "m");
        let ended = |world: &World| world.api.pod(&uid).is_none_or(Pod::ended);
        assert!(!ended(world));
        work(world, &uid)?;
        assert!(ended(world));
        world.quiet()
    });
}

/// The response to a Binding is lost, a check finds that the pod is not bound, and another pod wants the GPU. Only then does the
/// API server carry out the Binding.
#[test]
fn a_lost_bindings_memory_is_not_given_away() {
    told(|world| {
        let first = world
            .api
            .create("first", request(&[("m", App, 4)]), 0)
            .ok_or("the name is taken")?;
        let second = world
            .api
            .create("second", request(&[("m", App, 4)]), 0)
            .ok_or("the name is taken")?;
        world.see_all()?;
        // Both pods go to the node with one GPU of 4 units.
        let pod = world.api.pod(&first).ok_or("no pod")?.clone();
        world.bind(0, &pod, 0)?;
        call(world, Fate::Lost)?;
        world.answer_all()?;
        for _ in 0..5 {
            world.tick(11_000_000_000)?;
            sweep(world)?;
            world.answer_all()?;
            let pod = world.api.pod(&second).ok_or("no pod")?.clone();
            world.bind(0, &pod, 0)?;
            world.answer_all()?;
            world.check()?;
        }
        assert_eq!(world.api.late.len(), 1, "the API server still has it");
        late_write(&mut world.api, 0, &mut world.story)?;
        world.check()?;
        world.quiet()
    });
}

/// The outcome of a Binding is unknown when its GPU fails, and a second Binding is sent for another GPU. Either may be carried
/// out, so both count.
#[test]
fn two_doubtful_bindings_of_a_pod_both_count() {
    told(|world| {
        let uid = world
            .api
            .create("first", request(&[("m", App, 2)]), 0)
            .ok_or("the name is taken")?;
        world.see_all()?;
        let pod = world.api.pod(&uid).ok_or("no pod")?.clone();
        world.bind(0, &pod, NODE)?;
        call(world, Fate::Lost)?;
        world.answer_all()?;
        let ledger = world.extenders[0].core.index().ledger();
        let view = ledger.node(&world.nodes[NODE].name).ok_or("no node")?;
        let first = (0..2)
            .find(|position| view.used(*position).0 > 0)
            .ok_or("nothing is reserved")?;
        world.nodes[NODE].set_health(first, Health::Failed);
        world.nodes[NODE].publish(&mut world.api);
        world.see_all()?;
        world.bind(0, &pod, NODE)?;
        call(world, Fate::Answered)?;
        world.check()?;
        let ledger = world.extenders[0].core.index().ledger();
        let view = ledger.node(&world.nodes[NODE].name).ok_or("no node")?;
        assert_eq!([view.used(0), view.used(1)], [MiB(2048), MiB(2048)]);
        world.quiet()
    });
}

fn hold(mix: EventMix, steps: &[HistoryOp]) {
    let history = OpHistory {
        mix,
        steps: steps.to_vec(),
    };
    if let Some(told) = failure_of(&history) {
        panic!("{told}");
    }
}

/// A start lists the pods. The pod's object is removed, and the watch shows this before the list arrives.
#[test]
fn a_list_that_the_watch_overtook_brings_no_pod_back() {
    for luck in [1, 2, 3, 5] {
        hold(
            EventMix::Starts,
            &[
                create(0, 0, 0),
                hurry(0, 2, luck),
                HistoryOp::ForceDelete { pod: 0 },
                HistoryOp::ToAgent { node: 0, events: 4 },
                HistoryOp::ToAgent { node: 1, events: 4 },
                HistoryOp::Work { pod: 0, luck: 1 },
                HistoryOp::Work { pod: 0, luck: 1 },
                HistoryOp::Reconcile { node: 0, events: 0 },
                HistoryOp::Reconcile { node: 1, events: 0 },
            ],
        );
    }
}

/// A start lists the pods. Another pod is bound, and the watch shows this before the list arrives.
#[test]
fn a_list_that_the_watch_overtook_removes_no_pod() {
    hold(
        EventMix::Replicas,
        &[
            called(229, Fate::Answered),
            hurry(188, 2, 239),
            called(89, Fate::Answered),
            hurry(176, 1, 0),
        ],
    );
}

/// A start lists the pods. Before the list arrives, the pod's object is removed. The watch had not shown the pod yet, and starts
/// again without it, so no event will ever remove the pod.
#[test]
fn a_list_from_before_the_watch_began_again_brings_no_pod_back() {
    for luck in [1, 2, 3, 5] {
        hold(
            EventMix::Starts,
            &[
                create(0, 0, 0),
                hurry(0, 2, luck),
                HistoryOp::ForceDelete { pod: 0 },
                HistoryOp::RelistAgent { node: 0 },
                HistoryOp::RelistAgent { node: 1 },
                HistoryOp::AgentListArrives { node: 0 },
                HistoryOp::AgentListArrives { node: 1 },
                HistoryOp::Work { pod: 0, luck: 1 },
                HistoryOp::Work { pod: 0, luck: 1 },
            ],
        );
    }
}

/// A start lists the pods and is granted. Then the watch, which lags behind, shows an earlier pod as running, although it has
/// ended. The next start must check again.
#[test]
fn no_start_is_refused_for_memory_of_a_pod_that_has_ended() {
    let create = |name, shape| create(name, shape, 1);
    let end = |pod, container, how| HistoryOp::End { pod, container, how };
    hold(
        EventMix::Preemption,
        &[
            schedule(148, 208, 10),
            create(205, 217),
            hurry(234, 9, 216),
            end(127, 72, ContainerEnding::Well),
            end(24, 137, ContainerEnding::Well),
            create(221, 193),
            HistoryOp::Recreate { pod: 133 },
            hurry(56, 9, 7),
            create(120, 154),
            schedule(208, 10, 15),
            hurry(220, 9, 177),
            end(74, 86, ContainerEnding::Crash),
            hurry(96, 2, 245),
        ],
    );
}

#[test]
fn an_allocation_that_its_owner_wrote_buys_no_gpu() {
    for how in Forgery::ALL {
        for shape in [0, 4, 5, 7] {
            hold(EventMix::Cards, &[forge(0, shape, 1, 0, how), hurry(0, 9, 1)]);
        }
    }
}

/// According to the sums, there is room for a replacement of lower priority, but it would take the memory that the victims have
/// freed.
#[test]
fn a_gpu_that_was_freed_for_a_pod_is_kept_for_it() {
    hold(
        EventMix::Replicas,
        &[
            create(11, 73, 0),
            hurry(210, 3, 177),
            schedule(146, 235, 13),
            create(168, 99, 1),
            create(70, 2, 0),
            create(246, 126, 0),
        ],
    );
}

#[test]
fn a_proxy_that_finds_no_page_does_not_make_a_pod_forgotten() {
    for page in 0..12 {
        hold(
            EventMix::Binds,
            &[
                called(248, Fate::Taken),
                called(220, Fate::Taken),
                called(212, Fate::Answered),
                called(58, Fate::Page(page)),
            ],
        );
    }
}

/// The ids of a lost GPU disappear together with the pod that holds them, so evicting that pod makes no room. Another pod must be
/// evicted.
#[test]
fn a_pod_on_a_lost_gpu_is_evicted_in_vain() {
    hold(
        EventMix::Everything,
        &[
            called(100, Fate::Answered),
            create(28, 139, 1),
            forge(17, 244, 225, 43, Forgery::Nothing),
            HistoryOp::ReplaceCard { gpu: 187 },
            hurry(177, 9, 241),
            HistoryOp::StartAgent {
                node: 61,
                reserve: 1,
                listed: true,
            },
            HistoryOp::ReplaceCard { gpu: 120 },
            HistoryOp::ReplaceCard { gpu: 14 },
            forge(99, 121, 119, 140, Forgery::LegacyZero),
        ],
    );
}

/// The Binding is carried out, but a proxy answers instead of the API server, for example with a page that says "not found".
#[test]
fn a_pod_that_is_bound_counts_whatever_a_proxy_answered() {
    for page in 0..12 {
        hold(
            EventMix::Binds,
            &[
                create(0, 0, 0),
                to_extender(0, 5, 0),
                schedule(0, 0, 0),
                called(0, Fate::Taken),
                called(0, Fate::Page(page)),
                to_extender(0, 5, 0),
            ],
        );
    }
}

/// The API server of another cluster answers that it does not have the pod. Then another replica becomes the leader and binds the
/// pod.
#[test]
fn a_pod_wrongly_called_gone_counts_when_bound() {
    // One of the two replicas is the leader.
    for replica in [0, 1] {
        hold(
            EventMix::Replicas,
            &[
                create(0, 0, 0),
                to_extender(0, 5, 0),
                to_extender(1, 5, 0),
                schedule(0, 0, replica),
                // The check of the pod, then the Binding.
                called(0, Fate::Answered),
                called(0, Fate::Page(ProxyResponse::MISLEADING)),
                HistoryOp::Freeze { replica },
                HistoryOp::Tick { seconds: 16 },
                HistoryOp::Tick { seconds: 16 },
            ],
        );
    }
}

/// The same as in the test above, except that an earlier Binding without a response is carried out late. The watch shows this
/// before an older answer about the pod arrives.
#[test]
fn an_older_answer_takes_no_binding_back() {
    hold(
        EventMix::Binds,
        &[
            schedule(83, 222, 4),
            to_extender(6, 5, 1),
            HistoryOp::Schedule {
                pod: 249,
                node: 32,
                lost: true,
                replica: 12,
            },
            called(176, Fate::Answered),
            schedule(245, 55, 14),
            called(61, Fate::Page(179)),
            schedule(197, 171, 15),
            called(82, Fate::Taken),
            HistoryOp::LateWrite { call: 108 },
            create(139, 66, 0),
            hurry(205, 9, 68),
        ],
    );
}

/// Two GPUs have the same index, and the UUID of either may sort first. In this test, the UUID of the second replacement sorts
/// last.
#[test]
fn gpushares_index_means_the_card_that_is_there() {
    for gpu in 0..3 {
        for times in [1, 2] {
            let mut steps = vec![HistoryOp::ReplaceCard { gpu }; times];
            steps.extend([
                HistoryOp::Publish { node: 0 },
                HistoryOp::Publish { node: 1 },
                forge(0, 1, u8::from(gpu > 0), if gpu > 1 { 2 } else { 0 }, Forgery::LegacyExact),
                hurry(0, 9, 1),
            ]);
            hold(EventMix::Cards, &steps);
        }
    }
}

/// gpushare's own sum omits init containers, so more memory may count as used for a grant than the annotations say.
#[test]
fn a_gpushare_pod_continues_after_an_agent_restart() {
    hold(
        EventMix::Cards,
        &[
            forge(220, 56, 106, 216, Forgery::LegacyLess),
            hurry(0, 3, 4),
            HistoryOp::StartAgent {
                node: 106,
                reserve: 0,
                listed: true,
            },
        ],
    );
}

/// The kubelet runs with `cgroupsPerQOS: false`.
#[test]
fn without_pod_cgroups_a_running_containers_grant_stays() {
    hold(
        EventMix::NoPodCgroups,
        &[
            create(0, 0, 0),
            hurry(0, 9, 2),
            HistoryOp::ForceDelete { pod: 0 },
            HistoryOp::ToAgent { node: 0, events: 4 },
            HistoryOp::Reconcile { node: 0, events: 0 },
        ],
    );
}

/// The same as in the test above, except that no container has a grant. A pod is force-deleted while the kubelet requests the
/// start of its container, and the pod shares its ids with another pod (kubernetes#137534).
#[test]
fn without_pod_cgroups_device_ids_count_as_starting() {
    let create = |name, shape| create(name, shape, 0);
    hold(
        EventMix::NoPodCgroups,
        &[
            HistoryOp::LateWrite { call: 139 },
            hurry(145, 9, 71),
            schedule(58, 216, 3),
            create(105, 213),
            create(192, 93),
            create(223, 56),
            hurry(153, 1, 208),
            hurry(112, 2, 76),
            HistoryOp::ForceDelete { pod: 243 },
            HistoryOp::Work { pod: 229, luck: 215 },
        ],
    );
}

/// Two pods are nominated to a node, each with memory on two GPUs. By best fit, the first pod would take the only two GPUs on
/// which the second pod fits.
#[test]
fn nominated_pods_do_not_take_each_others_room() {
    hold(
        EventMix::Preemption,
        &[
            schedule(238, 202, 13),
            hurry(21, 2, 151),
            create(71, 99, 1),
            create(210, 69, 2),
            create(193, 18, 3),
            hurry(148, 2, 128),
            schedule(110, 172, 9),
            hurry(123, 9, 82),
            hurry(167, 0, 153),
            create(41, 59, 1),
        ],
    );
}

/// Divvy ignores gpushare's annotations of a pod with whole GPUs: its containers get the GPUs that their ids name. An agent that
/// restarts between two containers must not take the first one's record for the pod's allocation.
#[test]
fn whole_gpu_pods_continue_after_an_agent_restart() {
    hold(EventMix::Whole, &[forge(33, 22, 1, 21, Forgery::LegacyLess)]);
}

/// The sidecar runs, so the agent makes a record for the app container, which has not started. Then the init container starts again.
/// This holds even if another pod claims the GPU.
#[test]
fn a_crashed_init_container_has_its_gpu_again() {
    hold(
        EventMix::Whole,
        &[
            forge(141, 226, 199, 74, Forgery::Nothing),
            hurry(187, 0, 59),
            HistoryOp::Work { pod: 175, luck: 181 },
            hurry(129, 3, 17),
            HistoryOp::Work { pod: 71, luck: 255 },
            forge(25, 221, 57, 203, Forgery::LegacyLess),
            HistoryOp::End {
                pod: 33,
                container: 16,
                how: ContainerEnding::Crash,
            },
        ],
    );
}

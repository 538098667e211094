//! What a decision asks of the allocator.

use divvy_placement::policy::Policy;

#[path = "../../benches/cluster/mod.rs"]
mod cluster;

use cluster::Cluster;

/// Learning of a pod, deciding on it and taking its place. Once in 30 arrivals here the prices are looked at anew, rarer still the mix is fitted or a
/// table of what is known grows: these may.
#[test]
fn decisions_allocate_nothing_once_their_kinds_of_pods_are_known() {
    for policy in [Policy::Divvy, Policy::Fgd] {
        let mut cluster = Cluster::new(policy, 120, false);
        cluster.fill();
        cluster.placer = cluster.cold(policy);
        let mut turn = || {
            cluster.end();
            let demand = cluster.pod();
            let used = allocation_counter::measure(|| {
                cluster.arrive(&demand);
            });
            used.count_total
        };
        for _ in 0..500 {
            turn();
        }
        let allocating = (0..1000).filter(|_| turn() > 0).count();
        assert!(allocating <= 50, "{policy}: {allocating} of 1000 decisions allocated memory");
    }
}

//! XIDs, from the driver to the clients of the probe.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::served;
use crate::support::{GPU1, Lines, Machine, TWO, connect, eventually};

/// An XID reaches a client within a second, and a client that was away finds the XID in its hello.
#[test]
fn an_xid_reaches_every_client_or_waits_in_hello() {
    let machine = Machine::new(TWO);
    let _probe = machine.listening("s", &[]);
    let mut clients = [(); 2].map(|()| Lines::new(connect(&machine.path("s"))));
    for client in &mut clients {
        client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    }
    let before = Instant::now();
    machine.xid(1, 79);
    for client in &mut clients {
        let event = json!({
            "event": "fault", "seq": 1, "vendor": "nvidia", "uuid": GPU1, "code": 79, "fatal": true, "name": "XID 79", "partition": null,
        });
        assert_eq!(client.next(), Some(event));
    }
    assert!(before.elapsed() < Duration::from_secs(1), "{:?}", before.elapsed());
    let hello = Lines::new(connect(&machine.path("s"))).ask("{\"v\":1,\"id\":1,\"op\":\"hello\"}");
    assert_eq!(
        (&hello["ok"]["seq"], &hello["ok"]["recent"][0]["name"]),
        (&json!(1), &json!("XID 79"))
    );
}

#[test]
fn an_xid_of_a_mig_device_names_its_instances() {
    let (machine, _probe, mut client) = served(TWO);
    client.ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
    for instances in [json!([2, 0]), Value::Null] {
        machine.control(&json!({"op": "xid", "gpu": 1, "xid": 79, "instances": instances}));
        let fault = client.next().expect("a fault");
        assert_eq!((&fault["uuid"], &fault["partition"]), (&json!(GPU1), &instances), "{fault}");
    }
}

#[test]
fn xids_arrive_again_after_event_sets_failed() {
    let machine = Machine::new(TWO);
    std::fs::write(machine.path("control.state"), "{\"events\":{\"create\":999}}").expect("state");
    let _probe = machine.listening("s", &[]);
    let ask = |op: &str| Lines::new(connect(&machine.path("s"))).ask(&json!({"v": 1, "id": 1, "op": op}).to_string());
    let gpus = ask("snapshot")["ok"]["gpus"].clone();
    assert_eq!(gpus.as_array().map(Vec::len), Some(2), "GPUs are read without events");
    let faults = || {
        let mut lines = Lines::new(connect(&machine.path("s")));
        lines.send(b"{\"v\":1,\"id\":1,\"op\":\"hello\"}\n");
        // A fault may arrive before the answer.
        let mut lines = std::iter::from_fn(|| lines.next());
        lines.find_map(|line| line["ok"]["seq"].as_u64()).expect("an answer")
    };
    let xid = || machine.control(&json!({"op": "xid", "gpu": 1, "xid": 79}))["delivered"].clone();
    assert_eq!(xid(), 0);
    for failing in [json!({"op": "events", "create": 999}), json!({"op": "events", "wait": 999})] {
        machine.control(&failing);
        eventually("every GPU says that its events do not arrive", || {
            let gpus = ask("snapshot")["ok"]["gpus"].clone();
            let texts = gpus
                .as_array()
                .into_iter()
                .flatten()
                .map(|gpu| gpu["noEvents"]["error"].clone());
            let texts: Vec<String> = texts.filter_map(|text| Some(text.as_str()?.to_owned())).collect();
            texts.len() == 2 && texts.iter().all(|text| text.contains("event"))
        });
        let before = faults();
        machine.control(&json!({"op": "events"}));
        eventually("events arrive", || {
            let gpus = ask("snapshot")["ok"]["gpus"].clone();
            gpus.as_array().into_iter().flatten().all(|gpu| gpu["noEvents"].is_null())
        });
        // An XID may be lost with the old set.
        eventually("an XID arrives", || xid() != 0 && faults() > before);
    }
}

/// A GPU that has no events does not say so.
#[test]
fn a_gpu_that_cannot_be_registered_says_so() {
    let machine = Machine::new(TWO);
    let state = "{\"gpus\":{\"0\":{\"register\":999},\"1\":{\"register\":3}}}";
    std::fs::write(machine.path("control.state"), state).expect("state");
    let _probe = machine.listening("s", &[]);
    let gpus = || {
        let answer = Lines::new(connect(&machine.path("s"))).ask("{\"v\":1,\"id\":1,\"op\":\"snapshot\"}");
        answer["ok"]["gpus"].clone()
    };
    eventually("the time without events grows", || {
        gpus()[0]["noEvents"]["ms"].as_u64() > Some(0)
    });
    let gpus = gpus();
    let text = gpus[0]["noEvents"]["error"].as_str().unwrap_or_default();
    assert!(text.starts_with("it cannot be registered for events: "), "{gpus}");
    assert!(gpus[1]["noEvents"].is_null(), "{gpus}");
}

//! Tests placements and collectives of scripts on meshes of virtual devices, and at the prompt.
#![allow(clippy::unwrap_used)]

mod support;

use support::place;

#[test]
fn collectives_are_those_of_blocks_by_hand() {
    let p = place();
    p.file("placing.lua", include_str!("placing.lua"));
    for (mesh, printed) in
        [("dp=1", "1\t1"), ("dp=2", "2\t1"), ("dp=4", "4\t1"), ("dp=3", "3\t1"), ("dp=2,tp=2", "2\t2")]
    {
        let ran = p.run(&["run", "placing.lua", "--device", "cpu", "--mesh", mesh]);
        assert_eq!(ran.status, Some(0), "{mesh}: {}", ran.err);
        let text = format!("{}{}", ran.out, ran.err);
        assert!(text.contains(&format!("placed on\t{printed}")), "{mesh}: {text}");
    }
}

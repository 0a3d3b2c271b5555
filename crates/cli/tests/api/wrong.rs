//! Bodies, parameters and paths with mistakes.

use crate::server::Server;

/// A disk with another key.
const DISK: &str = r#"{"image": "ram:1M", "vhost-user": "/s", KEY}"#;

/// Method, path, body, status, field, part of the detail. A key alone stands for a disk with it.
type Case = (&'static str, &'static str, &'static str, u16, &'static str, &'static str);

#[track_caller]
fn check(server: &Server, cases: &[Case]) {
    for &(method, path, body, status, field, part) in cases {
        let body = if body.starts_with('"') { DISK.replace("KEY", body) } else { body.into() };
        let problem = server.bad(method, path, &body, status);
        let detail = problem["detail"].as_str().unwrap();
        assert!(detail.contains(part) && !detail.contains('\n'), "{body}: {detail}");
        assert_eq!(problem["field"].as_str().unwrap_or_default(), field, "{body}: {detail}");
    }
}

#[test]
fn mistakes_have_a_status_and_name_the_field() {
    let server = Server::start();
    server.good("POST", "/v1/disks", server.keys("a"));
    let cases = [
        ("POST", "/v1/disks", "", 400, "", "not JSON"),
        ("POST", "/v1/disks", "{", 400, "", "not JSON"),
        ("POST", "/v1/disks", "{} {}", 400, "", "not JSON"),
        ("POST", "/v1/disks", "\u{1}", 400, "", "not JSON"),
        ("POST", "/v1/disks", "[]", 422, "", "must be an object"),
        ("POST", "/v1/disks", "5", 422, "", "must be an object"),
        ("POST", "/v1/disks", r#""queues": 2, "queues": 3"#, 400, "", "\"queues\" is there twice"),
        ("PATCH", "/v1/disks/a", r#"{"iops": 2, "iops": 3}"#, 400, "", "is there twice"),
        ("POST", "/v1/disks", r#""serial": "a\nb""#, 422, "", "no control characters"),
        ("POST", "/v1/disks", r#""nbd": "unix:/a\nb""#, 422, "nbd", "no control characters"),
        ("POST", "/v1/disks", "{}", 422, "", "image"),
        ("POST", "/v1/disks", r#"{"image": "ram:1M"}"#, 422, "", "no export"),
        ("POST", "/v1/disks", r#""cach": "none""#, 422, "cach", "did you mean `cache`?"),
        ("POST", "/v1/disks", r#""queues": "two""#, 422, "queues", "a number of queues is"),
        ("POST", "/v1/disks", r#""read-only": 1"#, 422, "read-only", "must be true or false"),
        ("POST", "/v1/disks", r#""weight": 1e99"#, 422, "weight", "a weight is"),
        ("POST", "/v1/disks", r#""group": "g""#, 422, "group", "no table [group.g]"),
        ("POST", "/v1/disks", r#""name": """#, 422, "", "a name has 1 to 255 bytes"),
        ("POST", "/v1/disks", r#""name": "..""#, 422, "", "a name has 1 to 255 bytes"),
        ("POST", "/v1/disks", r#""name": "a\nb""#, 422, "", "no control characters"),
        ("POST", "/v1/disks?persist=true", r#""serial": "1""#, 409, "", "no configuration file"),
        ("PATCH", "/v1/disks/a", r#"{"queues": 2}"#, 422, "queues", "cannot change"),
        ("PATCH", "/v1/disks/a", r#"{"cache": "no"}"#, 422, "cache", "writethrough"),
        ("PATCH", "/v1/disks/a", r#"{"cache": "unsafe"}"#, 409, "cache", "would be lost"),
        ("PATCH", "/v1/disks/a", r#"{"weight": 0}"#, 422, "weight", "a weight is"),
        ("PATCH", "/v1/disks/a", r#"{"iops": 5, "reserve-iops": 6}"#, 422, "", "reserve-iops"),
        ("PATCH", "/v1/disks/b", "{}", 404, "", "no disk is called"),
        ("POST", "/v1/disks/a/snapshot", "{}", 422, "", "overlay"),
        ("POST", "/v1/disks/a/snapshot", r#"{"overlay": 5}"#, 422, "overlay", "must be a text"),
        (
            "POST",
            "/v1/disks/a/snapshot",
            r#"{"overlay": "/nof/a.qcow2"}"#,
            422,
            "overlay",
            "its folder /nof does not exist",
        ),
        ("POST", "/v1/disks/a/snapshot", r#"{"to": "x"}"#, 422, "to", "unknown field"),
        ("POST", "/v1/disks/a/resize", r#"{"size": -1}"#, 422, "size", "not negative"),
        ("POST", "/v1/disks/a/backup", "{}", 422, "", "target"),
        ("POST", "/v1/disks/a/backup", r#"{"target": 5}"#, 422, "target", "must be a text"),
        ("POST", "/v1/disks/a/fork", "{}", 422, "", "overlay"),
        ("POST", "/v1/disks/a/fork", r#"{"overlay": "/x.qcow2"}"#, 422, "", "disk"),
        (
            "POST",
            "/v1/disks/a/resize",
            r#"{"size": "16M"}"#,
            422,
            "size",
            "it is \"16M\", and must be a whole number",
        ),
        ("POST", "/v1/disks/b/commit", "", 404, "", "no disk is called"),
        ("DELETE", "/v1/disks/a?force=5", "", 400, "", "force"),
        ("DELETE", "/v1/disks/a?froce=true", "", 400, "", "froce"),
        ("POST", "/v1/reload?dry-run=x", "", 400, "", "dry-run"),
        ("GET", "/v1/jobs/x", "", 400, "", "x"),
        ("GET", "/v1/disks/%FF", "", 400, "", "UTF-8"),
        ("GET", "/v2", "", 404, "", "/v1/openapi.json"),
        ("PUT", "/v1/disks", "", 405, "", "PUT"),
    ];
    check(&server, &cases);
    assert_eq!(server.names(), ["a"]);
    let long = DISK.replace("KEY", &format!("\"name\": \"{}\"", "x".repeat(256)));
    server.bad("POST", "/v1/disks", &long, 422);
    let large = format!("\"{}\"", "x".repeat(70_000));
    server.bad("POST", "/v1/disks", &large, 413);
}

/// A failure logs the path as it is, so a newline in it would make a line of the log.
#[test]
fn paths_have_no_control_characters() {
    let server = Server::start();
    server.good("POST", "/v1/disks", server.keys("a"));
    let image = r#"{"name": "b", "image": "/a\u001b\nb", "vhost-user": "/s"}"#;
    let overlay = r#"{"overlay": "/tmp/a\u001b\nb.qcow2"}"#;
    let part = "has no control characters";
    check(
        &server,
        &[
            ("POST", "/v1/disks", image, 422, "", part),
            ("POST", "/v1/disks/a/snapshot", overlay, 422, "overlay", part),
        ],
    );
    let log = server.daemon.stop();
    assert!(!log.contains("b.qcow2"), "{log}");
}

#[test]
fn parameters_that_a_call_does_not_have_are_refused() {
    let server = Server::start();
    server.good("POST", "/v1/disks", server.keys("a"));
    check(
        &server,
        &[
            ("POST", "/v1/disks/a/snapshot?persist=true", "{}", 400, "", "it has none: other"),
            ("POST", "/v1/disks/b/commit?persist=true", "", 400, "", "no such parameter"),
            ("POST", "/v1/disks/a/fork?persist=true", "{}", 400, "", "it has none: other"),
            ("POST", "/v1/disks/a/flush?x", "", 400, "", "query parameter \"x\""),
            ("GET", "/v1/disks/a?a%0Ab=1", "", 400, "", "query parameter \"a\\nb\""),
            ("GET", "/v1/figures?name=a", "", 400, "", "no such parameter"),
            ("GET", "/v1/events?since=0&until=9", "", 400, "", "it has since"),
            ("GET", "/v1/openapi.json?format=yaml", "", 400, "", "it has none"),
            ("GET", "/v2?x=1", "", 404, "", "/v1/openapi.json"),
            ("PUT", "/v1/disks?x=1", "", 405, "", "PUT"),
        ],
    );
}

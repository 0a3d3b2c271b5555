//! The option phase, tested byte by byte.

use blockyard_nbd::wire::{OPTION_REPLY, export, info, rep};

use super::*;

const FIXED: u32 = handshake::FIXED_NEWSTYLE as u32 | handshake::NO_ZEROES as u32;

struct Asker(UnixStream);

impl Asker {
    /// Reads the greeting and answers with these flags.
    fn new(server: &Paired, flags: u32) -> Self {
        let mut stream = server.connect();
        let greeting: [u8; 18] = bytes(&mut stream);
        assert_eq!(greeting[..16], *b"NBDMAGICIHAVEOPT");
        assert_eq!(greeting[16..], (FIXED as u16).to_be_bytes());
        stream.write_all(&flags.to_be_bytes()).unwrap();
        Asker(stream)
    }

    fn send(&mut self, option: u32, data: &[u8]) {
        let mut bytes = wire::OPTION.to_be_bytes().to_vec();
        bytes.extend([option, data.len() as u32].map(u32::to_be_bytes).as_flattened());
        bytes.extend(data);
        self.0.write_all(&bytes).unwrap();
    }

    /// Returns the type and the data of the next reply.
    fn reply(&mut self, option: u32) -> (u32, Vec<u8>) {
        let head: [u8; 20] = bytes(&mut self.0);
        assert_eq!((wire::u64_at(&head, 0), wire::u32_at(&head, 8)), (OPTION_REPLY, option));
        let mut data = vec![0; wire::u32_at(&head, 16) as usize];
        self.0.read_exact(&mut data).unwrap();
        (wire::u32_at(&head, 12), data)
    }

    /// Returns the types and the data of all replies to an option.
    fn ask(&mut self, option: u32, data: &[u8]) -> Vec<(u32, Vec<u8>)> {
        self.send(option, data);
        let mut replies = vec![self.reply(option)];
        while matches!(replies.last(), Some((rep::INFO | rep::SERVER | rep::META_CONTEXT, _))) {
            replies.push(self.reply(option));
        }
        replies
    }

    fn last(&mut self, option: u32, data: &[u8]) -> u32 {
        self.ask(option, data).last().unwrap().0
    }
}

fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat()
}

/// Returns the data of GO and INFO.
fn go_data(name: &str, infos: &[u16]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((infos.len() as u16).to_be_bytes());
    data.extend(infos.iter().flat_map(|info| info.to_be_bytes()));
    data
}

/// Returns the data of the meta context options.
fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = string(name);
    data.extend((queries.len() as u32).to_be_bytes());
    queries.iter().for_each(|query| data.extend(string(query)));
    data
}

#[test]
fn an_export_is_described_as_the_client_asks() {
    let server = Paired::new();
    let mut asker = Asker::new(&server, FIXED);
    let replies =
        asker.ask(opt::INFO, &go_data(NAME, &[info::DESCRIPTION, info::BLOCK_SIZE, info::NAME]));
    let kinds: Vec<_> =
        replies.iter().map(|(kind, data)| (*kind, data.get(..2).map(<[u8]>::to_vec))).collect();
    let expected = |kind: u16| (rep::INFO, Some(kind.to_be_bytes().to_vec()));
    let all = [info::EXPORT, info::NAME, info::DESCRIPTION, info::BLOCK_SIZE].map(expected);
    assert_eq!(kinds, [&all[..], &[(rep::ACK, None)]].concat());
    assert_eq!(wire::u64_at(&replies[0].1, 2), SIZE);
    let flags = u16::from_be_bytes([replies[0].1[10], replies[0].1[11]]);
    assert_eq!(flags & export::SEND_DF, 0, "without structured replies");
    assert_ne!(flags & export::SEND_WRITE_ZEROES, 0);
    assert_eq!(
        (&replies[1].1[2..], &replies[2].1[2..]),
        (NAME.as_bytes(), &b"a disk in memory"[..])
    );
    let sizes = [1, 4096, wire::MOST_PAYLOAD].map(u32::to_be_bytes);
    assert_eq!(replies[3].1[2..], *sizes.as_flattened());
    // Without a request for more, the server sends only the required information. The empty name
    // selects the only export.
    let replies = asker.ask(opt::GO, &go_data("", &[]));
    assert_eq!(replies.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [rep::INFO, rep::ACK]);
    Client(asker.0).reads();
}

#[test]
fn export_name_is_answered_with_zeroes_unless_no_zeroes_is_set() {
    for (flags, zeroes) in [(FIXED, 0), (handshake::FIXED_NEWSTYLE.into(), 124), (0, 124)] {
        let server = Paired::new();
        let mut asker = Asker::new(&server, flags);
        asker.send(opt::EXPORT_NAME, NAME.as_bytes());
        let head: [u8; 10] = bytes(&mut asker.0);
        assert_eq!(wire::u64_at(&head, 0), SIZE);
        let mut rest = vec![0xff; zeroes];
        asker.0.read_exact(&mut rest).unwrap();
        assert!(rest.iter().all(|byte| *byte == 0));
        Client(asker.0).reads();
    }
}

#[test]
fn an_export_leaves_places_to_the_other_exports_of_its_address() {
    let exports = [NAME, "other"].map(|name| Exported::new(disk(name, false), name, "", None));
    let server = Paired::offering(exports);
    let limits = Limits { clients: 34, ..Limits::default() };
    server.server.set(Arc::new(Settings { limits, tls: None }));
    let go = |name: &str| {
        let mut asker = Asker::new(&server, FIXED);
        (asker.last(opt::GO, &go_data(name, &[])), asker)
    };
    let connect = |name| {
        let (answer, asker) = go(name);
        assert_eq!(answer, rep::ACK, "{name}");
        asker
    };
    let mut first: Vec<_> = (0..17).map(|_| connect(NAME)).collect();
    let (answer, mut refused) = go(NAME);
    assert_eq!(answer, rep::ERR_POLICY);
    assert_eq!(refused.last(opt::INFO, &go_data(NAME, &[])), rep::ACK, "information only");
    assert_eq!(refused.last(opt::GO, &go_data("other", &[])), rep::ACK);
    refused = Asker::new(&server, FIXED);
    refused.send(opt::EXPORT_NAME, NAME.as_bytes());
    assert!(is_disconnected(&mut refused.0));
    // A client that leaves gives its place back.
    first.pop();
    let mut last = go(NAME);
    while last.0 == rep::ERR_POLICY {
        last = go(NAME);
    }
    assert_eq!(last.0, rep::ACK);
    Client(last.1.0).reads();
}

#[test]
fn the_negotiation_continues_after_a_refused_option() {
    let server = Paired::new();
    let mut asker = Asker::new(&server, FIXED);
    let long = vec![0; (64 << 10) + 1];
    let mut name = string(NAME);
    name[3] += 1;
    for (option, data, refusal) in [
        (99, vec![], rep::ERR_UNSUP),
        (99, long.clone(), rep::ERR_UNSUP),
        (opt::STARTTLS, vec![], rep::ERR_POLICY),
        (opt::LIST, vec![1], rep::ERR_INVALID),
        (opt::GO, go_data("another", &[]), rep::ERR_UNKNOWN),
        (opt::GO, long.clone(), rep::ERR_TOO_BIG),
        (opt::GO, vec![], rep::ERR_INVALID),
        (opt::GO, name, rep::ERR_INVALID),
        (opt::GO, [go_data(NAME, &[]), vec![0]].concat(), rep::ERR_INVALID),
        (opt::INFO, go_data(&"x".repeat(4097), &[]), rep::ERR_TOO_BIG),
        (opt::SET_META_CONTEXT, contexts(NAME, &["base:allocation"]), rep::ERR_INVALID),
        (opt::STRUCTURED_REPLY, vec![0], rep::ERR_INVALID),
    ] {
        assert_eq!(asker.last(option, &data), refusal, "option {option}, {} bytes", data.len());
    }
    assert_eq!(asker.last(opt::STRUCTURED_REPLY, &[]), rep::ACK);
    assert_eq!(asker.last(opt::STRUCTURED_REPLY, &[]), rep::ERR_INVALID, "twice");
    assert_eq!(asker.last(opt::EXTENDED_HEADERS, &[]), rep::ACK);
    assert_eq!(asker.last(opt::STRUCTURED_REPLY, &[]), rep::ERR_EXT_HEADER_REQD);
    assert_eq!(asker.last(opt::GO, &go_data(NAME, &[])), rep::ACK);
}

#[test]
fn the_list_has_the_exports_that_a_client_may_see() {
    let of = |name: &str, text: &str| Exported::new(disk(name, false), name, text, None);
    let server = Paired::offering([
        of("a", "first"),
        of("b", ""),
        of("c", "").only_for(Some(&["someone".into()])),
    ]);
    let mut asker = Asker::new(&server, FIXED);
    let replies = asker.ask(opt::LIST, &[]);
    let described = [string("a"), b"first".to_vec()].concat();
    assert_eq!(replies, [(rep::SERVER, described), (rep::SERVER, string("b")), (rep::ACK, vec![])]);
    assert_eq!(asker.last(opt::GO, &go_data("c", &[])), rep::ERR_UNKNOWN);
    assert_eq!(
        asker.last(opt::GO, &go_data("", &[])),
        rep::ERR_UNKNOWN,
        "the empty name is none of several"
    );
    assert_eq!(asker.last(opt::GO, &go_data("b", &[])), rep::ACK);
}

#[test]
fn contexts_are_listed_and_chosen_by_name() {
    let server = Paired::new();
    let mut asker = Asker::new(&server, FIXED);
    assert_eq!(asker.last(opt::STRUCTURED_REPLY, &[]), rep::ACK);
    let mut names = |option, queries: &[&str]| -> Vec<(u32, String)> {
        let mut replies = asker.ask(option, &contexts(NAME, queries));
        assert_eq!(replies.pop(), Some((rep::ACK, vec![])));
        let name =
            |data: &[u8]| (wire::u32_at(data, 0), String::from_utf8(data[4..].to_vec()).unwrap());
        replies.iter().map(|(_, data)| name(data)).collect()
    };
    let expected = |id: u32, name: &str| (id, name.to_string());
    let all = ["base:allocation", "qemu:allocation-depth", "blockyard:layers"]
        .map(|name| expected(0, name));
    assert_eq!(names(opt::LIST_META_CONTEXT, &[]), all);
    assert_eq!(
        names(opt::LIST_META_CONTEXT, &["qemu:", "x"]),
        [expected(0, "qemu:allocation-depth")]
    );
    assert_eq!(names(opt::SET_META_CONTEXT, &["qemu:"]), [], "only whole names are chosen");
    let chosen = names(opt::SET_META_CONTEXT, &["blockyard:layers", "base:allocation"]);
    assert_eq!(chosen, [expected(3, "blockyard:layers"), expected(1, "base:allocation")]);
}

#[test]
fn a_client_that_breaks_the_phase_is_disconnected() {
    type Breaks = fn(&mut Asker);
    let broken: [(&str, u32, Breaks); 5] = [
        ("unknown flags", FIXED | 4, |_| {}),
        ("an option before fixed newstyle", 0, |asker| asker.send(opt::LIST, &[])),
        ("no option's magic", FIXED, |asker| asker.0.write_all(&[1; 16]).unwrap()),
        ("a name that is not there", FIXED, |asker| asker.send(opt::EXPORT_NAME, b"another")),
        ("too long an option", FIXED, |asker| {
            let head = [wire::OPTION.to_be_bytes().to_vec(), [0, 0, 0, 99, 0x7f, 0, 0, 0].to_vec()]
                .concat();
            asker.0.write_all(&head).unwrap();
        }),
    ];
    for (what, flags, breaks) in broken {
        let server = Paired::new();
        let mut asker = Asker::new(&server, flags);
        breaks(&mut asker);
        assert!(is_disconnected(&mut asker.0), "{what}");
    }
}

#[test]
fn a_client_has_a_bounded_number_of_options() {
    let server = Paired::new();
    let mut asker = Asker::new(&server, FIXED);
    for _ in 0..1024 {
        assert_eq!(asker.last(99, &[]), rep::ERR_UNSUP);
    }
    assert!(is_disconnected(&mut asker.0));
}

#[test]
fn an_abort_is_acknowledged_and_ends_the_connection() {
    let server = Paired::new();
    let mut asker = Asker::new(&server, FIXED);
    assert_eq!(asker.last(opt::ABORT, &[]), rep::ACK);
    assert!(is_disconnected(&mut asker.0));
}

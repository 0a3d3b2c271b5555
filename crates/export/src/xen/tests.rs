use super::*;

#[test]
fn names_have_the_numbers_that_guests_know() {
    for (name, number) in [
        ("xvda", 51712),
        ("xvdb", 51728),
        ("xvdp", 51952),
        ("xvdq", 1 << 28 | 16 << 8),
        ("xvdz", 268_441_856),
        ("xvdaa", 1 << 28 | 26 << 8),
        ("xvdzz", 1 << 28 | 701 << 8),
    ] {
        let parsed: Name = name.parse().unwrap();
        assert_eq!((parsed.number(), parsed.to_string().as_str()), (number, name));
        assert_eq!(Name::of_number(number), Some(parsed));
    }
    for name in ["", "xvd", "sda", "xvdA", "xvda1", "xvdaaa"] {
        assert!(name.parse::<Name>().is_err(), "{name}");
    }
    assert_eq!(Name::of_number(51713), None);
}

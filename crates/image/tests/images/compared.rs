//! Bytes that were read, compared with those that a model expects. Most compare equal as a whole: a
//! comparison byte by byte took most of the processor time of these tests.

/// Unit of comparison in bytes.
const PIECE: usize = 512;

/// Returns the index of the first byte that differs, in the length that both have.
pub fn first_difference(found: &[u8], expected: &[u8]) -> Option<usize> {
    let mut pieces = found.chunks(PIECE).zip(expected.chunks(PIECE));
    let piece = pieces.position(|(a, b)| a != b)? * PIECE;
    let rest = found[piece..].iter().zip(&expected[piece..]);
    Some(piece + rest.take(PIECE).position(|(a, b)| a != b)?)
}

/// Puts into the model what a discarded range reads as: each byte is zero or unchanged.
pub fn note_discard(now: &[u8], was: &mut [u8]) {
    assert_eq!(now.len(), was.len());
    for (now, was) in now.chunks(PIECE).zip(was.chunks_mut(PIECE)) {
        if now == was {
            continue;
        }
        let mut bytes = now.iter().zip(&*was);
        assert!(bytes.all(|(now, was)| *now == 0 || now == was), "a discard shows something else");
        was.copy_from_slice(now);
    }
}

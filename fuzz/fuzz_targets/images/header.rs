//! The start of a qcow2 file as data: its header is read or refused, and one that was read is
//! written as it was.

use blockyard_image::qcow2::Header;

pub fn fuzz(data: &[u8]) {
    let Some((lead, bytes)) = data.split_at_checked(2) else { return };
    let len = bytes.len() as u64 + u64::from(u16::from_le_bytes([lead[0], lead[1]])) * 512;
    let Ok(header) = Header::parse(bytes, len) else { return };
    let Ok(written) = header.serialize() else { return };
    let again = Header::parse(&written, len.max(written.len() as u64))
        .expect("what is written here is read here");
    assert_eq!(
        (again.size, again.l1_offset, &again.backing),
        (header.size, header.l1_offset, &header.backing)
    );
    assert_eq!(again.extensions.len(), header.extensions.len());
}

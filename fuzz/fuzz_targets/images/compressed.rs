//! Compressed clusters as data: they give a cluster or an error, in bounded memory; what is packed
//! here is unpacked here.

use blockyard_image::qcow2::{Compression, pack, unpack};

pub fn fuzz(data: &[u8]) {
    let Some((&lead, bytes)) = data.split_first() else { return };
    let compression = if lead & 1 == 0 { Compression::Zlib } else { Compression::Zstd };
    let size = 512usize << (lead >> 4).min(12);
    if lead & 2 == 0 {
        if let Ok(plain) = unpack(bytes, compression, size) {
            assert_eq!(plain.len(), size);
        }
        return;
    }
    let mut plain = bytes.to_vec();
    plain.resize(size, 0);
    if let Some(packed) = pack(&plain, compression).expect("memory can be packed") {
        assert!(packed.len() < plain.len());
        assert!(
            unpack(&packed, compression, size).expect("what is packed here is unpacked here")
                == plain
        );
    }
}

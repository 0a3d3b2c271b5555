//! Messages that arrive in parts.

use std::mem::MaybeUninit;

use super::*;

fn send_part(front: &Front, bytes: &[u8], fd: &OwnedFd) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd.as_fd()];
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    let parts = [std::io::IoSlice::new(bytes)];
    rustix::net::sendmsg(&front.stream, &parts, &mut control, SendFlags::NOSIGNAL).unwrap();
}

#[test]
fn a_message_of_many_parts_has_few_descriptors() {
    let mut front = Front::new();
    let (fd, body) = front.region();
    let header = [Req::ADD_MEM_REG as u32, 1 | 8, body.len() as u32];
    let header: Vec<u8> = header.iter().flat_map(|word| word.to_ne_bytes()).collect();
    send_part(&front, &header, &fd);
    body.iter().for_each(|byte| send_part(&front, &[*byte], &fd));
    let error = front.messages.next(|_| ()).expect_err("the session goes on").to_string();
    assert!(error.contains("more than 32 descriptors"), "{error}");
}

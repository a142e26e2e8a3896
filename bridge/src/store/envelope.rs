//! What is around every file of the store, in all versions: a checksum over the raw bytes of what is inside.
//!
//! The whole file is one JSON document that an admin can read with any tool. Its first line is
//! `{"crc32":"<8 hex digits>","length":<bytes>,"content":`, then the content comes as it is, and the last two
//! lines are empty but for `}`. The checksum (CRC-32 as in zip and Ethernet) covers exactly the `length` bytes of
//! the content: from behind the first line break to before the last-but-one. Everything else follows from
//! those bytes, so that no bit of a file can change unnoticed.

/// What is wrong with the bytes of a file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Damage {
    #[error("it is empty")]
    Empty,
    #[error("its first line is not that of a file of gpu-bridge")]
    NoHeader,
    #[error("its first line announces {announced} bytes, and {found} follow")]
    Length { announced: u64, found: usize },
    #[error("its content has the checksum {found}, and its first line says {announced}")]
    Checksum { announced: String, found: String },
    #[error("there is something around its content that does not belong there")]
    Wrapping,
}

#[derive(serde::Deserialize)]
struct Header {
    crc32: String,
    length: u64,
}

const END: &str = "\n}\n";

/// The bytes of a file with this content.
pub(super) fn seal(content: &str) -> Vec<u8> {
    let header = format!(
        "{{\"crc32\":\"{}\",\"length\":{},\"content\":\n",
        checksum(content.as_bytes()),
        content.len()
    );
    [&header, content, END].concat().into_bytes()
}

/// The content of a file, if every byte is as it was written.
pub(super) fn open(bytes: &[u8]) -> Result<&[u8], Damage> {
    if bytes.is_empty() {
        return Err(Damage::Empty);
    }
    let line = bytes
        .iter()
        .position(|byte| *byte == b'\n')
        .ok_or(Damage::NoHeader)?;
    let (header, rest) = bytes.split_at(line);
    let header: Header = serde_json::from_slice(&[header, b"null}"].concat())
        .map_err(|_not_json| Damage::NoHeader)?;
    let content = rest
        .get(1..rest.len().saturating_sub(END.len()))
        .unwrap_or_default();
    if u64::try_from(content.len()) != Ok(header.length) {
        return Err(Damage::Length {
            announced: header.length,
            found: content.len(),
        });
    }
    let found = checksum(content);
    if header.crc32 != found {
        return Err(Damage::Checksum {
            announced: header.crc32,
            found,
        });
    }
    // What is left is the spelling of the first line and the end.
    match std::str::from_utf8(content) {
        Ok(text) if seal(text) == bytes => Ok(content),
        Ok(_) | Err(_) => Err(Damage::Wrapping),
    }
}

fn checksum(bytes: &[u8]) -> String {
    format!("{:08x}", crc32fast::hash(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_content_comes_out_as_it_went_in() {
        for content in ["{}", "", "{\n  \"a\": \"ä\"\n}"] {
            assert_eq!(open(&seal(content)), Ok(content.as_bytes()));
        }
        let whole = String::from_utf8(seal("{}")).unwrap();
        assert_eq!(
            whole,
            "{\"crc32\":\"a3a6bf43\",\"length\":2,\"content\":\n{}\n}\n"
        );
    }

    #[test]
    fn the_damage_is_named() {
        let damage = |text: &str| open(text.as_bytes()).unwrap_err().to_string();
        assert_eq!(damage(""), "it is empty");
        assert_eq!(
            damage("{\"units\":[]}"),
            "its first line is not that of a file of gpu-bridge"
        );
        let whole = String::from_utf8(seal("{}")).unwrap();
        assert_eq!(
            damage(&whole[..whole.len() - 1]),
            "its first line announces 2 bytes, and 1 follow"
        );
        assert!(damage(&whole.replace("\n{}", "\n[]")).contains("checksum"));
        assert!(damage(&whole.replace("{\"crc32\"", "{ \"crc32\"")).contains("around"));
        assert!(damage(&whole.replace("\n}", " }")).contains("around"));
    }
}

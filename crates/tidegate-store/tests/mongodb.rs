//! MongoDB, or what stands in for it, keeps what every store promises.
#![expect(clippy::unwrap_used, reason = "in a test, a panic is the report")]

mod rows;

use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

use mongodb::bson::{Binary, Document, doc, spec::BinarySubtype};
use mongodb::{Client, Collection};
use tidegate_core::Limits;
use tidegate_store::{DatabaseOptions, MongoDb, StoreError};
use tidegate_testkit::servers::database::DatabaseServer;
use tidegate_testkit::servers::mongo::mongo;

struct Mongo;

impl rows::Kind for Mongo {
    type Store = MongoDb;

    /// A server that stands alone has no transactions.
    const HALF_TAKEN: bool = true;
    const NOWHERE: &str = "mongodb://tidegate:secret@127.0.0.1:1/";
    const RESTARTS: &[fn(&DatabaseServer)] = &[rows::stop_and_start, |server| {
        // What stands in writes to its file every second.
        sleep(Duration::from_secs(3));
        rows::kill_and_start(server);
    }];

    fn server() -> Option<DatabaseServer> {
        let server = mongo()?;
        rows::runtime().block_on(probe(server.url()));
        Some(server)
    }

    async fn rows(server: &DatabaseServer, prefix: &str) -> u64 {
        let client = Client::with_uri_str(server.url()).await.unwrap();
        let state = client.database("tidegate").collection::<Document>(&format!("{prefix}state"));
        state.count_documents(doc! {}).await.unwrap()
    }

    async fn forget(server: &DatabaseServer, prefix: &str) {
        let client = Client::with_uri_str(server.url()).await.unwrap();
        for name in ["state", "meta"] {
            client.database("tidegate").collection::<Document>(&format!("{prefix}{name}")).drop().await.unwrap();
        }
    }

    async fn make_later(server: &DatabaseServer, prefix: &str) {
        let client = Client::with_uri_str(server.url()).await.unwrap();
        let meta = client.database("tidegate").collection::<Document>(&format!("{prefix}meta"));
        let later = Binary { subtype: BinarySubtype::Generic, bytes: b"2".to_vec() };
        let updated = meta.update_one(doc! { "_id": "schema" }, doc! { "$set": { "value": later } }).await.unwrap();
        assert_eq!(updated.matched_count, 1);
    }

    async fn add_junk_nodes(server: &DatabaseServer, prefix: &str) {
        let junk: Document = (0..1500).map(|id| (format!("nodes.junk{id}"), "junk".into())).collect();
        let updated = node_documents(server, prefix)
            .await
            .update_one(doc! { "_id": "nodes" }, doc! { "$set": junk })
            .await
            .unwrap();
        assert_eq!(updated.matched_count, 1);
    }

    async fn junk_nodes(server: &DatabaseServer, prefix: &str) -> u64 {
        let found = node_documents(server, prefix).await.find_one(doc! { "_id": "nodes" }).await.unwrap().unwrap();
        let is_junk = |(name, _): &(&String, _)| name.starts_with("junk");
        found.get_document("nodes").unwrap().iter().filter(is_junk).count() as u64
    }

    fn open(limits: Arc<Limits>, options: &DatabaseOptions) -> Result<MongoDb, StoreError> {
        MongoDb::new(limits, options)
    }
}

async fn node_documents(server: &DatabaseServer, prefix: &str) -> Collection<Document> {
    let client = Client::with_uri_str(server.url()).await.unwrap();
    client.database("tidegate").collection(&format!("{prefix}meta"))
}

/// The test needs a server that compares and swaps, with one document for each id: of many clients that lock the same
/// one, one succeeds.
async fn probe(url: &str) {
    let client = Client::with_uri_str(url).await.unwrap();
    let probe = client.database("probe").collection::<Document>("probe");
    let winners = |round: i64| {
        let probe = probe.clone();
        futures_util::future::join_all((0..16_i64).map(move |task| {
            let probe = probe.clone();
            async move {
                match round {
                    0 => probe.insert_one(doc! { "_id": 1, "v": 1_i64, "by": task }).await.is_ok(),
                    round => {
                        let next = doc! { "$set": { "v": round + 1, "by": task } };
                        probe.update_one(doc! { "_id": 1, "v": round }, next).await.unwrap().matched_count == 1
                    }
                }
            }
        }))
    };
    for round in 0..20 {
        let won = winners(round).await.into_iter().filter(|won| *won).count();
        assert_eq!(won, 1, "of 16 in round {round}: this server can't compare and swap");
    }
}

suite!(Mongo);

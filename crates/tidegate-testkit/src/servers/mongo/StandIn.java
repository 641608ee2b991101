import de.bwaldvogel.mongo.MongoServer;
import de.bwaldvogel.mongo.MongoDatabase;
import de.bwaldvogel.mongo.MongoVersion;
import de.bwaldvogel.mongo.backend.AbstractUniqueIndex;
import de.bwaldvogel.mongo.backend.Index;
import de.bwaldvogel.mongo.backend.IndexKey;
import de.bwaldvogel.mongo.backend.KeyValue;
import de.bwaldvogel.mongo.backend.h2.H2Backend;
import de.bwaldvogel.mongo.backend.h2.H2Database;
import de.bwaldvogel.mongo.bson.Document;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CountDownLatch;
import org.h2.mvstore.MVMap;

/** Speaks MongoDB's protocol on a port of loopback, with its data in a file, until it is asked to end. */
class StandIn {
    /** The least that drivers of today ask for; what we use of it is older. */
    enum Version implements MongoVersion {
        MONGO_4_4;

        public List<Integer> getVersionArray() {
            return List.of(4, 4, 0);
        }

        public int getWireVersion() {
            return 9;
        }
    }

    /**
     * A unique index that also answers queries with more conditions than its own fields, as MongoDB's do. The
     * library's own answers those by reading the whole collection.
     */
    static class PrefixIndex extends AbstractUniqueIndex<Object> {
        private final MVMap<KeyValue, Object> positions;

        PrefixIndex(MVMap<KeyValue, Object> positions, String name, List<IndexKey> keys, boolean sparse) {
            super(name, keys, sparse);
            this.positions = positions;
        }

        @Override
        public synchronized boolean canHandle(Document query) {
            var ofTheIndex = new Document();
            keys().stream().filter(query::containsKey).forEach(key -> ofTheIndex.append(key, query.get(key)));
            return super.canHandle(ofTheIndex);
        }

        @Override
        protected Object getPosition(KeyValue key) {
            return positions.get(key);
        }

        @Override
        protected boolean putKeyPosition(KeyValue key, Object position) {
            return positions.putIfAbsent(key, position) == null;
        }

        @Override
        protected Object removeDocument(KeyValue key) {
            return positions.remove(key);
        }

        @Override
        protected Iterable<Map.Entry<KeyValue, Object>> getIterable() {
            return positions.entrySet();
        }

        @Override
        public long getCount() {
            return positions.sizeAsLong();
        }

        @Override
        public long getDataSize() {
            return getCount();
        }
    }

    static class Backend extends H2Backend {
        Backend(String file) {
            super(file);
        }

        @Override
        protected MongoDatabase openOrCreateDatabase(String database) {
            return new H2Database(database, getMvStore(), getCursorRegistry()) {
                @Override
                protected Index<Object> openOrCreateUniqueIndex(
                        String collection, String index, List<IndexKey> keys, boolean sparse) {
                    // The library's own name for it, by which it deletes it with its collection.
                    var name = getFullCollectionNamespace(collection) + "._index_" + index;
                    return new PrefixIndex(getMvStore().openMap(name), index, keys, sparse);
                }
            };
        }
    }

    public static void main(String[] arguments) throws InterruptedException {
        var backend = new Backend(arguments[0]);
        backend.version(Version.MONGO_4_4);
        var server = new MongoServer(backend);
        Runtime.getRuntime().addShutdownHook(new Thread(server::shutdownNow));
        server.bind("127.0.0.1", Integer.parseInt(arguments[1]));
        System.err.println("ready for connections");
        new CountDownLatch(1).await();
    }
}

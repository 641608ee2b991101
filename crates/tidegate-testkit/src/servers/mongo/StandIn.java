import de.bwaldvogel.mongo.MongoServer;
import de.bwaldvogel.mongo.MongoVersion;
import de.bwaldvogel.mongo.backend.h2.H2Backend;
import java.util.List;
import java.util.concurrent.CountDownLatch;

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

    public static void main(String[] arguments) throws InterruptedException {
        var backend = new H2Backend(arguments[0]);
        backend.version(Version.MONGO_4_4);
        var server = new MongoServer(backend);
        Runtime.getRuntime().addShutdownHook(new Thread(server::shutdownNow));
        server.bind("127.0.0.1", Integer.parseInt(arguments[1]));
        System.err.println("ready for connections");
        new CountDownLatch(1).await();
    }
}

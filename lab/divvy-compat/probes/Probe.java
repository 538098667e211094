/** Asks the libraries from Java, by probe.c. */
public class Probe {
    static native int probe();

    public static void main(String[] words) {
        System.load("/probe/libprobe.so");
        System.exit(probe());
    }
}
